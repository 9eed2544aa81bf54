"""The paper's equations, numbered as there, in plain PyTorch: the oracle every other backend is held against.

Shapes: B batch, N tokens, D width, H hidden width of the host, R rank. Features are `[..., R]` or `[..., H]`, one
vector a token. Norms and inner products are computed in float32 for half-precision inputs and in the input's own
precision otherwise, so float64 in gives float64 out. The RMSNorm here has no learned weight.

| Eq. | | here |
|---|---|---|
| 3 | q = RMSNorm(u * v) | `quadratic` |
| 4 | m = RMSNorm(P b) | `main_feature` |
| 5, 6 | q_perp = RMSNorm(q - <q, m> / (|m|^2 + eps) m) | `orthogonalize` |
| 7, 8, 10, 11 | h = b + gate * delta | `inject` |
| 9 | delta = RMSNorm(O q_perp) | `update` |
| 12 | z = h_L + sigmoid(gamma) h_{L-1} | `readout` |
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
Space = Literal["hidden", "rank", "none"]  # where the complement is made orthogonal to the host


class Parts(NamedTuple):
    """The branch's intermediates; q, m and q_perp live in the space of the projection (R, or H for full)."""

    q: Tensor
    m: Tensor | None
    q_perp: Tensor
    delta: Tensor  # [..., H]


def upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """A scope without autocast, for what must not be rounded to half precision."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension."""
    x = upcast(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def quadratic(u: Tensor, v: Tensor, eps: float) -> Tensor:
    """Eq. 3, the raw quadratic feature."""
    return rms_norm(upcast(u) * upcast(v), eps)  # [..., R]


def main_feature(pb: Tensor, eps: float) -> Tensor:
    """Eq. 4, the host's hidden map seen in the space of the projection."""
    return rms_norm(pb, eps)


def residual(q: Tensor, m: Tensor, eps: float) -> Tensor:
    """What Eq. 5 normalises: q without its component along m; orthogonal to m (Eq. 6)."""
    share = (q * m).sum(-1, keepdim=True) / (m.square().sum(-1, keepdim=True) + eps)
    return q - share * m


def orthogonalize(q: Tensor, m: Tensor, eps: float) -> Tensor:
    """Eq. 5."""
    return rms_norm(residual(q, m, eps), eps)


def update(
    b: Tensor, u: Tensor, v: Tensor, lift: Map, project: Map | None, *, space: Space, normalise: bool, eps: float
) -> Parts:
    """The complement's direction delta, in the host's hidden space.

    `space="rank"` is OQC-LR: Eqs. 3 to 5, then Eq. 9 (`normalise=False` leaves Eq. 9's norm out: Eq. 7 as printed).
    `space="hidden"` is full OQC as the text has it: lift, normalise, project against RMSNorm(b), normalise.
    `space="none"` is the ablation without orthogonalisation: q takes the place of q_perp.
    """
    q = quadratic(u, v, eps)
    if space == "hidden":
        q = rms_norm(_apply(lift, q, b), eps)  # [..., H]
        m = main_feature(b, eps)  # [..., H]
        q_perp = orthogonalize(q, m, eps)
        return Parts(q, m, q_perp, q_perp)
    m_rank = None
    q_perp = q
    if space == "rank":
        assert project is not None
        m_rank = main_feature(project(b), eps)  # [..., R]
        q_perp = orthogonalize(q, m_rank, eps)
    delta = _apply(lift, q_perp, b)  # [..., H]
    return Parts(q, m_rank, q_perp, rms_norm(delta, eps) if normalise else upcast(delta))


def _apply(lift: Map, q: Tensor, like: Tensor) -> Tensor:
    """The lift O, run in the host's precision."""
    return lift(q.to(like.dtype))


def inject(b: Tensor, delta: Tensor, gate: Tensor) -> Tensor:
    """Eqs. 7, 8, 10, 11: h = b + gate * delta, in b's precision; the gate is one number or one a token."""
    return (upcast(b) + upcast(gate) * delta).to(b.dtype)


def readout(last: Tensor, penultimate: Tensor, gamma: Tensor) -> Tensor:
    """Eq. 12, the penultimate-residual readout."""
    return last + torch.sigmoid(gamma).to(last.dtype) * penultimate
