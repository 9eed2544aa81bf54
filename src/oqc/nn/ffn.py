"""OQCFFN: any complement on any host, with the signature of timm's Mlp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oqc import ops
from oqc.config import BACKENDS, COMPLEMENTS, check_choice, check_positive, is_number, whole
from oqc.nn.complements import Complement, check_dtype
from oqc.nn.hosts import AFBO, GATES, GLU, MLP, Bias, Host, host_class, match_hidden


class OQCFFN(nn.Module):
    """y = W (b(x) + gate * delta(x)): a host's hidden map b, and the complement orthogonal to it.

    Drop-in for `timm.layers.Mlp`: the positional arguments are timm's, the keyword ones are ours. Input and output
    are `[B, N, D]`, `[B, h, w, D]`, or with `use_conv` `[B, D, h, w]`. `match=4` picks the hidden width at which the
    host has the parameters of an MLP of ratio 4 (and wins over `hidden_features`, which timm always passes).
    `act_layer`, which it passes too, is the mlp host's; the others have activations of their own.
    `grid` and `prefix_tokens` matter to the AFBO host alone; without `grid` the tokens after the prefix are a square.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        norm_layer: Callable[..., nn.Module] | None = None,
        bias: Bias = True,
        drop: float | tuple[float, float] = 0.0,
        use_conv: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        host: str = "mlp",
        complement: str = "lowrank",
        rank: int = 56,
        match: float | None = None,
        groups: int = 1,
        gate_init: float | None = None,
        init: str = "paper",
        eps: float = 1e-6,
        grid: tuple[int, int] | None = None,
        prefix_tokens: int = 0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_choice("complement", complement, COMPLEMENTS)
        check_choice("backend", backend, BACKENDS)
        cls = host_class(host)
        for name, value in (("eps", eps), ("match", 1 if match is None else match)):
            check_positive(name, value)
        for name, made in (("act_layer", act_layer), ("norm_layer", norm_layer or nn.LayerNorm)):
            is_module = isinstance(made, nn.Module)
            if (is_module or not callable(made)) and (cls is MLP or name == "norm_layer"):
                got = f"a {type(made).__name__} that is made already" if is_module else repr(made)
                raise ValueError(f"{name} must be a class of modules or a function that makes one, got {got}")
        for name, both in (("bias", bias), ("drop", drop)):
            if not (isinstance(both, bool) or is_number(both) or (isinstance(both, (tuple, list)) and len(both) == 2)):
                raise ValueError(f"{name} must be one value or two, got {both!r}")
        if grid is not None and not (isinstance(grid, (tuple, list)) and len(grid) == 2):
            raise ValueError(f"grid must be None or (rows, columns), got {grid!r}")
        check_dtype(dtype)
        in_features, groups = whole("in_features", in_features, 1), whole("groups", groups, 1)
        rank, prefix_tokens = whole("rank", rank), whole("prefix_tokens", prefix_tokens, 0)
        grid = None if grid is None else (whole("grid", grid[0], 1), whole("grid", grid[1], 1))
        out = in_features if out_features is None else whole("out_features", out_features, 1)
        hidden = in_features if hidden_features is None else whole("hidden_features", hidden_features, 1)
        if match is not None:
            hidden = match_hidden(host, in_features, ratio=match, out=out, bias=bias, groups=groups)
        if groups != 1 and host != "afbo":
            raise ValueError(f"groups is for the afbo host, got groups {groups} with host {host!r}")
        self.use_conv, self.backend, self.host_name = use_conv, backend, host
        self.in_features, self.hidden_features = in_features, hidden
        self.options: dict[str, Any] = {  # what `mlp_layer` takes, for saving
            "host": host,
            "complement": complement,
            "rank": rank,
            "match": match,
            "groups": groups,
            "gate_init": gate_init,
            "init": init,
            "eps": eps,
            "grid": grid,
            "prefix_tokens": prefix_tokens,
            "backend": backend,
        }
        factory = {"device": device, "dtype": dtype}
        common: dict[str, Any] = {"bias": bias, "drop": drop, "norm_layer": norm_layer, **factory}
        self.host: Host
        if cls is MLP:
            self.host = MLP(in_features, hidden, out, act=act_layer, **common)
        elif cls is GLU:
            self.host = GLU(in_features, hidden, out, act=GATES[host], **common)
        else:
            self.host = AFBO(in_features, hidden, out, groups=groups, grid=grid, prefix_tokens=prefix_tokens, **common)
        self.complement: Complement | None = None
        if complement != "none":
            self.complement = Complement(
                complement, in_features, hidden, rank, gate_init=gate_init, init=init, eps=eps, **factory
            )

    def init_weights(self) -> None:
        """Called by timm's initialisers after they have been over the linear layers: restores the branch's start."""
        if self.complement is not None:
            self.complement.init_weights(host=self.host.fc2.weight)

    def forward(
        self,
        x: Tensor,
        folded: ops.fused.Folded | None = None,
        *,
        residual: Tensor | None = None,
        then: ops.Norm | None = None,
    ) -> Any:
        """`folded` is this layer's share of `fold_together`, where a model does that for all its layers at once;
        `residual` is added to the output, in the same kernel where there is one that can. With `then` there are two
        results: that sum and, if the same kernel can make it too, the norm of it, else None."""
        if residual is not None:
            if self._adds(x, residual) and (folded is not None or self._is_one_operator(x)):
                return self._fused(x, folded, residual, then)
            s = residual + self.forward(x, folded)
            return s if then is None else (s, None)
        x, host, complement = self._enter(x), self.host, self.complement
        if folded is not None or self._is_one_operator(x):
            return self._leave(self._fused(x, folded))
        if complement is None:
            return self._leave(host.project(host.mix(*host.maps(x))))
        out = host.fc2 if ops.is_plain(host.fc2) and not host.between() else host.project
        y = complement.network(x, host.up(), getattr(host, "act", None), out, self.backend)
        if y is None:
            maps = host.maps(x)
            kept = complement.keep(maps)
            y = complement(x, kept, host.mix(*maps), out, self.backend)
        return self._leave(y)

    def intermediates(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The output by the literal equations, with b, q, m, q_perp, delta, gate and h by name."""
        x, kept, b = self._hidden(x)
        named = {"b": b, "h": b} if self.complement is None else self.complement.intermediates(x, kept, b)
        return self._leave(self.host.project(named["h"])), named

    def _is_one_operator(self, x: Tensor) -> bool:
        """Whether fused kernels run the whole network: an AFBO whose layers are all plain, with none between."""
        host, branch = self.host, self.complement
        if not isinstance(host, AFBO) or host.between():
            return False
        if not ops.fused.chosen(self.backend, x, 0 if branch is None else branch.rank):
            return False
        if not _are_depthwise(host.spatial_a, host.spatial_b):
            return False
        layers = (host.map_a, host.map_b, host.spatial_a, host.spatial_b, host.fc2)
        return ops.fits(x, *layers) if branch is None else branch.fuses(x, *layers)

    def _adds(self, x: Tensor, residual: Tensor) -> bool:
        """Whether a kernel can add this residual: as large as the output, which nothing changes before the sum."""
        if self.complement is None or self.use_conv or residual.dtype != torch.float32:
            return False
        return not ops.acts(self.host.drop2) and residual.shape == (*x.shape[:-1], self.host.fc2.out_features)

    def takes_half(self) -> bool:
        """Whether all that reads the input is a plain layer, for which autocast rounds it anyway."""
        branch = self.complement
        own = () if branch is None else (getattr(branch, "u", None), getattr(branch, "v", None), branch.gate_map)
        return ops.is_plain(*self.host.up(), *own)

    def _fused(
        self,
        x: Tensor,
        folded: ops.fused.Folded | None,
        residual: Tensor | None = None,
        then: ops.Norm | None = None,
    ) -> Any:
        host: Any = self.host
        options: dict[str, Any] = {"grid": x.shape[1:3]} if x.dim() == 4 else {"grid": host.grid_of(x.shape[1])}
        options["prefix"] = 0 if x.dim() == 4 else host.prefix_tokens
        if self.complement is not None:
            options |= self.complement.fused_options(x) | {"folded": folded, "residual": residual, "then": then}
        layers = (host.map_a, host.map_b, host.spatial_a, host.spatial_b, host.fc2)
        return ops.fused.ffn_afbo(x, *(t for layer in layers for t in (_weight(layer), layer.bias)), **options)

    def _hidden(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """x with channels last, what the branch reads of the host's maps of it, and b [..., H]."""
        x = self._enter(x)
        maps = self.host.maps(x)
        kept = maps if self.complement is None else self.complement.keep(maps)
        return x, kept, self.host.mix(*maps)

    def _enter(self, x: Tensor) -> Tensor:
        if self.use_conv and x.dim() != 4:
            raise ValueError(f"with use_conv the input must be [B, {self.in_features}, h, w], got {list(x.shape)}")
        return x.permute(0, 2, 3, 1) if self.use_conv else x  # [B, h, w, D]

    def _leave(self, y: Tensor) -> Tensor:
        y = self.host.drop2(y)
        return y.permute(0, 3, 1, 2) if self.use_conv else y

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes a plain MLP's keys too (`fc1.weight` for `host.fc1.weight`), also of one made of 1x1 convolutions."""
        own = self.host.state_dict(keep_vars=True)
        for name in [name for name in state_dict if name.startswith(prefix)]:
            short = name.removeprefix(prefix)
            if short in own:
                value = state_dict.pop(name)
                if value.dim() == 4 and own[short].dim() == 2 and value.shape[2:] == (1, 1):
                    value = value.flatten(1)
                state_dict[f"{prefix}host.{short}"] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"host={self.host_name!r}, backend={self.backend!r}"


def _weight(layer: Any) -> Tensor:
    """Of a grouped map with its zeros: one product of x for all maps is faster than a small one a group."""
    return layer.dense_weight() if hasattr(layer, "dense_weight") else layer.weight


def _are_depthwise(*convolutions: object) -> bool:
    """Whether they are what AFBO's kernels compute: 3x3 maps of each channel with zeros around, all with a bias or
    none. What somebody put in their place may be anything."""
    for one in convolutions:
        if not isinstance(one, nn.Conv2d) or one.padding_mode != "zeros":
            return False
        if (one.kernel_size, one.stride, one.padding, one.dilation) != ((3, 3), (1, 1), (1, 1), (1, 1)):
            return False
        if not one.groups == one.in_channels == one.out_channels:
            return False
    return len({getattr(one, "bias", None) is None for one in convolutions}) == 1


def fold_together(modules: Sequence[object], x: Tensor) -> Sequence[ops.fused.Folded | None]:
    """What the fused kernels need of the weights alone, for layers of one kind in one launch instead of one each.

    None for each where they are not all such layers, with their weights at hand (a sharded one gathers its own later).
    x is any tensor of the dtype and device of their inputs.
    """
    layers = [layer for layer in modules if isinstance(layer, OQCFFN) and layer.complement is not None]
    branches = [layer.complement for layer in layers if layer.complement is not None]
    kinds = {
        (layer.host_name, layer.hidden_features, b.kind, b.rank) for layer, b in zip(layers, branches, strict=True)
    }
    if len(layers) < len(modules) or len(kinds) != 1 or not all(layer._is_one_operator(x) for layer in layers):
        return [None] * len(modules)
    weights = [layer.host.fc2.weight for layer in layers]
    if any(weight.device != x.device for weight in weights):  # a model over several devices
        return [None] * len(modules)
    projects = [None if branch.project is None else branch.project.weight for branch in branches]
    lifts = [branch.lift.weight for branch in branches]
    return ops.fused.fold(weights, lifts, projects, branches[0].kind.space, ops.fused.compute_dtype(x))


def mlp_layer(complement: str = "lowrank", rank: int = 56, **options: Any) -> Callable[..., OQCFFN]:
    """A feed-forward network to build a timm model with, which then takes checkpoints of the plain model too.

    >>> timm.create_model("vit_small_patch16_224", mlp_layer=oqc.mlp_layer(complement="lowrank", rank=56))

    `options` are OQCFFN's keyword arguments: `host`, `match`, `gate_init`, ... To fine-tune pretrained weights give
    `init="identity"`, which `inject` has by default and a network that is built does not.
    """
    groups = whole("groups", options.get("groups", 1), 1)
    size = max(1, whole("rank", rank, None if complement == "none" else 1)) * groups
    OQCFFN(size, size, complement=complement, rank=rank, device="meta", **options)  # mistakes show here, not in timm
    return partial(OQCFFN, complement=complement, rank=rank, **options)
