"""Families of feed-forward networks, each by the paper's equations in float64 and by the fused operators, and the
errors between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from oqc.ops import fused, reference
from oqc.ops.plain import ACTIVATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
PARALLEL = 0.85  # |cos| of branch and host beyond which a token is measured apart
NEAREST = 0.95  # beyond this not at all
SCALARS = ("beta", "gate_bias")

Squares = dict[str, tuple[float, float]]  # by tensor: the sum of squared errors, and of the oracle's squares


class Case(NamedTuple):
    """What a kernel is compiled for. A shape is a case with images, grid rows and prefix tokens."""

    width: int
    hidden: int
    rank: int
    columns: int
    space: str = "rank"
    normalise: bool = True
    gate: str = "scalar"  # token, one
    shared: bool = False
    bias: bool = True
    complement: bool = True
    mix: str = "afbo"  # or an activation
    gated: bool = True
    residual: bool = False  # added in the operator, in fp32

    def __str__(self) -> str:
        kind = f"{self.space}-{self.gate}" if self.complement else "host"
        host = "" if self.mix == "afbo" else f"-{self.mix}" + "-gated" * self.gated
        return f"D{self.width}-H{self.hidden}-R{self.rank}-w{self.columns}-{kind}{host}" + "-sum" * self.residual


SMALL = [
    Case(16, 24, 5, 3),
    Case(20, 33, 8, 2, space="hidden"),
    Case(16, 24, 3, 5, space="none", gate="token"),
    Case(33, 40, 17, 1, normalise=False),
    Case(16, 24, 5, 6, gate="token", bias=False),
    Case(20, 16, 4, 4, shared=True),
    Case(20, 24, 8, 9, gate="one"),
    Case(16, 40, 1, 8, complement=False),
    Case(16, 24, 8, 3, gate="token", residual=True),
    Case(20, 40, 11, 3, space="hidden", residual=True),
    Case(20, 24, 5, 2, space="none", residual=True),
    Case(20, 30, 5, 3, complement=False, residual=True),
    Case(264, 24, 5, 2),
    Case(16, 80, 70, 2),
    Case(12, 96, 75, 2, space="hidden"),
    Case(16, 24, 5, 2, mix="gelu", gated=False),
    Case(20, 33, 8, 3, space="hidden", mix="silu"),
    Case(12, 16, 4, 2, shared=True, mix="quick_gelu", gated=False),
]
LARGE = [
    Case(256, 664, 56, 8, residual=True),
    Case(256, 664, 64, 8, space="hidden", residual=True),
    Case(256, 664, 83, 8, gate="token", residual=True),
    Case(256, 664, 56, 8, complement=False),
    Case(320, 328, 48, 14),
    Case(384, 200, 33, 7, space="hidden"),
    Case(100, 83, 128, 8, space="none", gate="token", bias=False),
    Case(64, 72, 33, 5, normalise=False),
    Case(48, 130, 40, 16, shared=True),
    Case(128, 96, 40, 3, space="hidden", bias=False),
    Case(192, 768, 64, 14, mix="gelu", gated=False),
    Case(320, 200, 40, 7, space="hidden", mix="silu"),
]


def tensors(case: Case, images: int, rows: int, prefix: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    d, h, r = case.width, case.hidden, case.rank
    named = {
        "x": normal(images, prefix + rows * case.columns, d),
        "map_a": normal(h, d, scale=d**-0.5),
        "weight": normal(d, h, scale=h**-0.5),
    }
    named |= {"residual": normal(images, prefix + rows * case.columns, d)} if case.residual else {}
    named |= {"map_b": normal(h, d, scale=d**-0.5)} if case.gated else {}
    named |= {f"spatial_{i}": normal(h, 1, 3, 3, scale=0.4) for i in ("a", "b") if case.mix == "afbo"}
    if case.bias:
        named |= {f"{n}_bias": normal(h, scale=0.3) for n in ("map_a", "map_b", "spatial_a", "spatial_b") if n in named}
        named["bias"] = normal(d)
    if case.complement:
        named |= {"u": normal(r, d, scale=d**-0.5), "v": normal(r, d, scale=d**-0.5)} if not case.shared else {}
        named["lift"] = normal(h, r, scale=r**-0.5)
        named |= {"project": normal(r, h, scale=h**-0.5)} if case.space == "rank" else {}
        named |= {"beta": normal()} if case.gate == "scalar" else {}
        named |= {"gate_weight": normal(1, d, scale=d**-0.5)} if case.gate == "token" else {}
        named |= {"gate_bias": normal(1)} if case.gate == "token" and case.bias else {}
    return named


def leaves(named: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: item.to(DEVICE, dtype).clone().requires_grad_() for name, item in named.items()}


def spatial(a: Tensor, tap: Tensor, bias: Tensor | None, rows: int, columns: int, prefix: int) -> Tensor:
    grid = a[:, prefix:].unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
    mapped = F.conv2d(grid, tap, bias, padding=1, groups=tap.shape[0]).flatten(2).transpose(1, 2)
    return torch.cat([a[:, :prefix], mapped], dim=1)


def hidden_map(case: Case, p: dict[str, Tensor], rows: int, prefix: int) -> tuple[Tensor, Tensor, Tensor]:
    """b, u and v by PyTorch."""
    x, place = p["x"], (rows, case.columns, prefix)
    a = c = F.linear(x, p["map_a"], p.get("map_a_bias"))
    if case.gated:
        c = F.linear(x, p["map_b"], p.get("map_b_bias"))
    if case.mix == "afbo":
        left = spatial(a, p["spatial_a"], p.get("spatial_a_bias"), *place)
        b = F.gelu(left) * spatial(c, p["spatial_b"], p.get("spatial_b_bias"), *place)
    else:
        b = ACTIVATIONS[case.mix](a) * c if case.gated else ACTIVATIONS[case.mix](a)
    if case.shared or not case.complement:
        return b, a[..., : case.rank], c[..., : case.rank]
    return b, F.linear(x, p["u"]), F.linear(x, p["v"])


def gate_of(case: Case, p: dict[str, Tensor]) -> Tensor:
    """[] or, one a token, [..., 1]."""
    if case.gate == "token":
        return torch.sigmoid(reference.upcast(F.linear(p["x"], p["gate_weight"], p.get("gate_bias"))))
    return torch.sigmoid(p["beta"]) if case.gate == "scalar" else p["x"].new_ones(())


def literal(case: Case, p: dict[str, Tensor], rows: int, prefix: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The output by the paper's equations, |cos| of the branch to the host, and the gate of every token."""
    b, u, v = hidden_map(case, p, rows, prefix)
    rest = p.get("residual", 0)
    if not case.complement:
        return rest + F.linear(b, p["weight"], p.get("bias")), None, None
    gate = gate_of(case, p).expand(*b.shape[:-1], 1)
    parts = reference.update(
        b,
        u,
        v,
        lambda q: F.linear(q, p["lift"]),
        lambda b: F.linear(b, p["project"]),
        space=case.space,  # type: ignore[arg-type]
        normalise=case.normalise,
        eps=EPS,
    )
    cosine = None if parts.m is None else F.cosine_similarity(parts.q, parts.m, dim=-1).abs().detach()
    return rest + F.linear(reference.inject(b, parts.delta, gate), p["weight"], p.get("bias")), cosine, gate


def literal_output(case: Case, p: dict[str, Tensor], rows: int, prefix: int) -> Tensor:
    return literal(case, p, rows, prefix)[0]


def ours(case: Case, p: dict[str, Tensor], rows: int, prefix: int) -> Tensor:
    """The whole network in one operator."""
    branch: dict[str, Any] = {}
    if case.complement:
        branch = {"space": case.space, "normalise": case.normalise, "eps": EPS}
        if case.gate == "token":
            branch["gate"] = (p["gate_weight"], p.get("gate_bias"))
        else:
            branch |= {"beta": p["beta"]} if case.gate == "scalar" else {"gate": gate_of(case, p)}
        branch |= {name: p.get(name) for name in ("u", "v", "project", "lift")}
    if case.residual:
        branch["residual"] = reference.upcast(p["residual"])
    if case.mix != "afbo":
        ups = [(p[name], p.get(f"{name}_bias")) for name in ("map_a", "map_b") if name in p]
        return fused.ffn_mix(p["x"], ups, p["weight"], p.get("bias"), act=case.mix, **branch)
    maps = [p.get(name + end) for name in ("map_a", "map_b", "spatial_a", "spatial_b") for end in ("", "_bias")]
    return fused.ffn_afbo(p["x"], *maps, p["weight"], p.get("bias"), grid=(rows, case.columns), prefix=prefix, **branch)


def ours_from_hidden(case: Case, p: dict[str, Tensor], rows: int, prefix: int) -> Tensor:
    """The operator of the other hosts, on a hidden map that PyTorch made."""
    return p.get("residual", 0) + fused.ffn_complement(
        *hidden_map(case, p, rows, prefix),
        gate_of(case, p),
        p["weight"],
        p.get("bias"),
        p["lift"],
        p.get("project"),
        space=case.space,  # type: ignore[arg-type]
        normalise=case.normalise,
        eps=EPS,
    )


def measure(
    case: Case,
    functions: Sequence[Callable[..., Tensor]],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    seed: int,
    *,
    near: bool = False,
) -> list[Squares]:
    """Of each function, the errors of the output and of every gradient over the tokens with |cos| <= 0.85, or with
    `near` over those up to 0.95."""
    images, rows, prefix = shape
    named = {name: item.to(dtype) for name, item in tensors(case, images, rows, prefix, seed).items()}
    exact = leaves(named, torch.float64)
    y, cosine, gate = literal(case, exact, rows, prefix)
    chosen = torch.ones_like(y[..., :1])
    if cosine is not None:
        chosen = ((cosine > PARALLEL) & (cosine <= NEAREST) if near else cosine <= PARALLEL)[..., None].double()
    generator = torch.Generator().manual_seed(seed)
    dy = (torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) * chosen).to(dtype)
    if gate is not None and gate.requires_grad:
        gate.retain_grad()
    y.backward(dy.double())
    found = []
    for function in functions:
        low = leaves(named, dtype)
        result = function(case, low, rows, prefix)
        result.backward(dy.to(result.dtype))
        squares = {"y": squares_of(result * chosen.to(dtype), y * chosen)}
        squares |= {name: squares_of(low[name].grad, t.grad) for name, t in exact.items() if t.grad is not None}
        if gate is not None and gate.grad is not None:
            terms = float((gate.grad * gate * (1 - gate)).detach().abs().sum()) ** 2
            squares |= {name: (squares[name][0], terms) for name in SCALARS if name in squares}
        found.append(squares)
    return found


def squares_of(given: Tensor | None, exact: Tensor) -> tuple[float, float]:
    assert given is not None
    assert given.isfinite().all()
    return float((given.double() - exact).detach().square().sum()), float(exact.detach().square().sum())


def ratio(pair: tuple[float, float]) -> float:
    """RMS error over RMS of the oracle."""
    return (pair[0] / pair[1]) ** 0.5 if pair[1] else float(pair[0] > 0)
