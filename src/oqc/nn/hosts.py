"""Host feed-forward networks: input -> hidden map b -> output projection.

A host computes b in two steps, so that a complement can stand beside it and fused kernels can merge what reads x:
`maps(x)`, its linear maps of the input, and `mix(*maps)`, everything between those and b. `fc2` is the output
projection W. Hidden and output layers have timm's names, so an MLP host loads a timm checkpoint's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oqc.config import HOSTS, check_choice
from oqc.ops import acts, mark_activation
from oqc.ops.plain import ACTIVATIONS

Activation = Callable[[Tensor], Tensor]
Bias = bool | tuple[bool, bool]  # of the layers that read the input, and of fc2


def pair(value: Any) -> tuple[Any, Any]:
    """One for before the hidden map and one for after it, as timm's Mlp takes its bias and dropout."""
    first, second = value if isinstance(value, (tuple, list)) else (value, value)
    return first, second


class Host(nn.Module):
    """What every host has: the output projection and what timm's Mlp puts around it."""

    fc2: nn.Linear
    act: Any  # what stands between the maps and b, where that is all

    def __init__(
        self, hidden: int, out: int, bias: bool, drop: float | tuple[float, float], norm_layer: Any, **kwargs: Any
    ) -> None:
        super().__init__()
        self.drop1 = nn.Dropout(pair(drop)[0])
        self.norm = norm_layer(hidden, **kwargs) if norm_layer is not None else nn.Identity()
        self.fc2 = nn.Linear(hidden, out, bias=bias, **kwargs)
        self.drop2 = nn.Dropout(pair(drop)[1])

    def up(self) -> tuple[nn.Module, ...]:
        """The layers that read the input."""
        raise NotImplementedError

    def maps(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple([layer(x) for layer in self.up()])

    def mix(self, *maps: Tensor) -> Tensor:
        raise NotImplementedError

    def between(self) -> bool:
        """Whether anything acts between the hidden map and fc2 right now: dropout in training, a norm, a hook."""
        return acts(self.drop1) or acts(self.norm)

    def project(self, h: Tensor) -> Tensor:
        return self.fc2(self.norm(self.drop1(h)))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.project(self.mix(*self.maps(x))))


class MLP(Host):
    """b = act(A x)."""

    def __init__(self, width: int, hidden: int, out: int, *, bias: Bias, act: Any, **kwargs: Any) -> None:
        first, last = pair(bias)
        super().__init__(hidden, out, last, **kwargs)
        self.fc1 = nn.Linear(width, hidden, bias=first, **_factory(kwargs))
        self.act = act()
        mark_activation(self.act)

    @staticmethod
    def parameters_of(width: int, hidden: int, out: int, bias: Bias = True, groups: int = 1) -> int:
        first, last = pair(bias)
        return width * hidden + hidden * out + first * hidden + last * out

    def up(self) -> tuple[nn.Module, ...]:
        return (self.fc1,)

    def mix(self, *maps: Tensor) -> Tensor:
        return self.act(maps[0])


class GLU(Host):
    """b = act(A x) * (B x): GLU (sigmoid), bilinear (no activation), ReGLU, GEGLU, SwiGLU."""

    def __init__(self, width: int, hidden: int, out: int, *, bias: Bias, act: Activation, **kwargs: Any) -> None:
        first, last = pair(bias)
        super().__init__(hidden, out, last, **kwargs)
        self.fc1_g = nn.Linear(width, hidden, bias=first, **_factory(kwargs))
        self.fc1_x = nn.Linear(width, hidden, bias=first, **_factory(kwargs))
        self.act = act

    @staticmethod
    def parameters_of(width: int, hidden: int, out: int, bias: Bias = True, groups: int = 1) -> int:
        first, last = pair(bias)
        return 2 * width * hidden + hidden * out + first * 2 * hidden + last * out

    def up(self) -> tuple[nn.Module, ...]:
        return self.fc1_g, self.fc1_x

    def mix(self, *maps: Tensor) -> Tensor:
        return self.act(maps[0]) * maps[1]


class AFBO(Host):
    """b = GELU(DW3x3(A x)) * DW3x3(B x) on the token grid (Asymmetric Factorized Bilinear Operation, ICLR 2025).

    `groups=1`: A and B are dense. Otherwise A is the overlapped cycle mapping over `groups` channel groups and B the
    grouped cross mapping over `groups / 2`, so both cost 2 D H / groups. Prefix tokens (class, registers) come before
    the grid and are carried past the spatial maps: b = GELU(A x) * B x for them.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        out: int,
        *,
        bias: Bias,
        groups: int,
        grid: tuple[int, int] | None,
        prefix_tokens: int,
        **kwargs: Any,
    ) -> None:
        first, last = pair(bias)
        super().__init__(hidden, out, last, **kwargs)
        if groups != 1:
            if groups % 2:
                raise ValueError(f"groups must be 1 (dense) or an even number, got {groups}")
            for name, size in (("in_features", width), ("hidden_features", hidden)):
                if size % groups:
                    raise ValueError(f"groups must divide {name}, got groups {groups} with {name} {size}")
        factory = _factory(kwargs)
        self.grid, self.prefix_tokens = grid, prefix_tokens
        if groups == 1:
            self.map_a: nn.Module = nn.Linear(width, hidden, bias=first, **factory)
            self.map_b: nn.Module = nn.Linear(width, hidden, bias=first, **factory)
        else:
            self.map_a = CycleMap(width, hidden, groups, bias=first, **factory)
            self.map_b = CrossMap(width, hidden, groups // 2, bias=first, **factory)
        self.spatial_a = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=first, **factory)
        self.spatial_b = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=first, **factory)

    @staticmethod
    def parameters_of(width: int, hidden: int, out: int, bias: Bias = True, groups: int = 1) -> int:
        first, last = pair(bias)
        channel = 2 * width * hidden // (1 if groups == 1 else groups // 2)
        return channel + 18 * hidden + hidden * out + first * 4 * hidden + last * out

    def up(self) -> tuple[nn.Module, ...]:
        return self.map_a, self.map_b

    def mix(self, *maps: Tensor) -> Tensor:
        a, b = maps
        if a.dim() not in (3, 4):
            raise ValueError(f"the afbo host takes [B, N, D] or [B, h, w, D], got {a.dim()} dimensions")
        if a.dim() == 4:  # [B, h, w, H], already a grid
            return F.gelu(_on_grid(self.spatial_a, a)) * _on_grid(self.spatial_b, b)
        rows, columns = self.grid_of(a.shape[1])
        p = self.prefix_tokens
        grid = (a.shape[0], rows, columns, a.shape[2])
        left = _on_grid(self.spatial_a, a[:, p:].reshape(grid)).flatten(1, 2)  # [B, N - p, H]
        right = _on_grid(self.spatial_b, b[:, p:].reshape(grid)).flatten(1, 2)
        if p:
            left, right = torch.cat([a[:, :p], left], dim=1), torch.cat([b[:, :p], right], dim=1)
        return F.gelu(left) * right

    def grid_of(self, tokens: int) -> tuple[int, int]:
        """Rows and columns of the token grid; without a fixed grid, the square that the token count makes."""
        if self.grid is not None:
            rows, columns = self.grid
            if tokens != self.prefix_tokens + rows * columns:
                raise ValueError(
                    f"the input has {tokens} tokens, but a grid of {rows} x {columns} with prefix_tokens"
                    f" {self.prefix_tokens} needs {self.prefix_tokens + rows * columns}"
                )
            return rows, columns
        side = int(max(tokens - self.prefix_tokens, 0) ** 0.5 + 0.5)  # math.isqrt takes no symbolic number of tokens
        if side == 0 or side * side != tokens - self.prefix_tokens:
            raise ValueError(
                f"the input has {tokens} tokens, which is not a square grid plus prefix_tokens"
                f" {self.prefix_tokens}; pass grid=(rows, columns) or prefix_tokens"
            )
        return side, side


class CycleMap(nn.Module):
    """Overlapped cycle channel mapping: group i's linear reads channel groups i and i + 1, cyclically."""

    def __init__(self, width: int, hidden: int, groups: int, *, bias: bool, **factory: Any) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups, hidden // groups, 2 * width // groups, **factory))
        self.bias = nn.Parameter(torch.empty(hidden, **factory)) if bias else None
        _reset_grouped(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.groups, -1))  # [..., G, D / G]
        x = torch.cat([x, x.roll(-1, dims=-2)], dim=-1)  # [..., G, 2 D / G]
        y = torch.einsum("...gi,goi->...go", x, self.weight).flatten(-2)  # [..., H]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dense_weight(self) -> Tensor:
        """[H, D], with zeros where a group does not read: what the fused kernels' one product of x takes."""
        own = torch.eye(self.groups, dtype=torch.bool, device=self.weight.device)[:, None, :, None]  # [G, 1, G, 1]
        first, second = (half.unsqueeze(2) for half in self.weight.chunk(2, dim=-1))  # [G, H / G, 1, D / G]
        weight = torch.where(own, first, torch.where(own.roll(1, dims=2), second, 0))  # [G, H / G, G, D / G]
        return weight.flatten(2).flatten(0, 1)


class CrossMap(nn.Module):
    """Grouped cross channel mapping: group i's linear feeds every output group; its outputs are interleaved."""

    def __init__(self, width: int, hidden: int, groups: int, *, bias: bool, **factory: Any) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups, hidden // groups, width // groups, **factory))
        self.bias = nn.Parameter(torch.empty(hidden, **factory)) if bias else None
        _reset_grouped(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("...gi,goi->...og", x.unflatten(-1, (self.groups, -1)), self.weight).flatten(-2)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dense_weight(self) -> Tensor:
        """[H, D], as CycleMap's."""
        own = torch.eye(self.groups, dtype=torch.bool, device=self.weight.device)[:, :, None]  # [G, G, 1]
        weight = torch.where(own, self.weight.transpose(0, 1).unsqueeze(2), 0)  # [H / G, G, G, D / G]
        return weight.flatten(2).flatten(0, 1)


def _reset_grouped(weight: Tensor, bias: Tensor | None) -> None:
    """nn.Linear's own start, for each group."""
    bound = 1 / math.sqrt(weight.shape[-1])
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)


def _on_grid(conv: nn.Module, x: Tensor) -> Tensor:
    """A depthwise map on [B, h, w, H]: the permuted view is channels-last, so nothing is copied."""
    return conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


def _factory(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in ("device", "dtype") if name in kwargs}


GATES: dict[str, Activation] = {
    "glu": ACTIVATIONS["sigmoid"],
    "bilinear": ACTIVATIONS["identity"],
    "reglu": ACTIVATIONS["relu"],
    "geglu": ACTIVATIONS["gelu"],
    "swiglu": ACTIVATIONS["silu"],
}


def host_class(name: str) -> type[MLP] | type[GLU] | type[AFBO]:
    check_choice("host", name, HOSTS)
    return {"mlp": MLP, "afbo": AFBO}.get(name, GLU)  # type: ignore[return-value]


def match_hidden(
    host: str, width: int, *, ratio: float = 4.0, out: int | None = None, bias: Bias = True, groups: int = 1
) -> int:
    """The hidden width, a multiple of 8 (and of `groups`), at which the host's parameters come nearest to an MLP's
    whose hidden width is `ratio` times `width`."""
    out = out or width
    budget = MLP.parameters_of(width, round(ratio * width), out, bias)
    if host == "mlp":
        return round(ratio * width)
    cls, step = host_class(host), math.lcm(8, groups)
    base = cls.parameters_of(width, 0, out, bias, groups)
    slope = cls.parameters_of(width, step, out, bias, groups) - base  # the count is affine in the hidden width
    return max(1, round((budget - base) / slope)) * step
