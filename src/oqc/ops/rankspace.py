"""The same functions without hidden-width work: the rank-space identity.

The host's output projection W is linear, so the update need not be formed at width H. It is always a combination of b
and the lift's columns, gate * delta = kappa b + O z, with a scalar kappa and a vector z [R] per token. With
G = O^T O [R, R] and M = W O [D, R]

    W (b + gate * delta) = (1 + kappa) W b + M z

so that delta and h never exist. For the low-rank forms kappa is 0 and

    rho^2 = q_perp^T G q_perp / H + eps,      z = gate / rho * q_perp.

For full OQC, with t = O^T b, a = O q / rho_a, m = b / rho_b and c = <a, m> / (|m|^2 + eps), every inner product of the
hidden-space projection is a number made of q^T G q, <q, t> and |b|^2:

    rho_r^2 = |a - c m|^2 / H + eps,   kappa = -gate c / (rho_b rho_r),   z = gate / (rho_a rho_r) * q.

Exact in exact arithmetic. |a - c m|^2 is a difference of nearly equal numbers where b and O q are nearly parallel, so
it is clamped at 0 and loses digits there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from oqc.ops.reference import Space, full_precision, main_feature, orthogonalize, quadratic, upcast


def coefficients(
    b: Tensor,  # [..., H]
    u: Tensor,  # [..., R]
    v: Tensor,  # [..., R]
    gate: Tensor,  # [] or [..., 1]
    lift: Tensor,  # O [H, R]
    project: Tensor | None,  # P [R, H], for space="rank"
    *,
    space: Space,
    normalise: bool,
    eps: float,
    gram: Tensor | None = None,  # G [R, R], where it is known already
) -> tuple[Tensor | None, Tensor]:
    """(kappa, z) with gate * delta = kappa b + O z; kappa is None where it is 0."""
    hidden = b.shape[-1]
    q = quadratic(u, v, eps)
    gate = upcast(gate)
    if space == "rank":
        assert project is not None
        q = orthogonalize(q, main_feature(F.linear(b, project), eps), eps)
    if not normalise:
        return None, gate * q
    with full_precision(b):
        if gram is None:
            wide = upcast(lift)
            gram = wide.T @ wide
        energy = ((q @ gram.to(q.dtype)) * q).sum(-1, keepdim=True).clamp_min(0)  # |O q|^2 [..., 1]
    if space != "hidden":
        return None, gate * torch.rsqrt(energy / hidden + eps) * q
    t = upcast(F.linear(b, lift.T))  # O^T b [..., R]
    power = upcast(b).square().sum(-1, keepdim=True)  # |b|^2
    return full_coefficients(q, t, power, energy, gate, hidden=hidden, eps=eps)


def full_coefficients(
    q: Tensor, t: Tensor, power: Tensor, energy: Tensor, gate: Tensor, *, hidden: int, eps: float
) -> tuple[Tensor, Tensor]:
    """(kappa, z) of full OQC from q, t = O^T b, |b|^2 and |O q|^2."""
    scale_a = torch.rsqrt(energy / hidden + eps)  # 1 / rho_a
    scale_b = torch.rsqrt(power / hidden + eps)  # 1 / rho_b
    inner = (q * t).sum(-1, keepdim=True) * scale_a * scale_b  # <a, m>
    main_power = power * scale_b.square()  # |m|^2
    c = inner / (main_power + eps)
    rest = (energy * scale_a.square() - 2 * c * inner + c.square() * main_power).clamp_min(0)  # |a - c m|^2
    scale_r = torch.rsqrt(rest / hidden + eps)  # 1 / rho_r
    return -gate * c * scale_b * scale_r, gate * scale_a * scale_r * q


def output(
    b: Tensor,
    u: Tensor,
    v: Tensor,
    gate: Tensor,
    weight: Tensor,  # W [D, H]
    bias: Tensor | None,  # [D]
    lift: Tensor,
    project: Tensor | None,
    *,
    space: Space,
    normalise: bool,
    eps: float,
    gram: Tensor | None = None,  # G [R, R] and M [D, R], where they are known already
    merged: Tensor | None = None,
) -> Tensor:
    """y = W (b + gate * delta) + bias, with nothing of width H formed for the branch.

    Where the gate is 0, y is W b + bias to the last bit.
    """
    kappa, z = coefficients(b, u, v, gate, lift, project, space=space, normalise=normalise, eps=eps, gram=gram)
    if merged is None:
        with full_precision(b):
            merged = upcast(weight) @ upcast(lift)  # M [D, R]
    branch = F.linear(z.to(b.dtype), merged.to(b.dtype))  # [..., D]
    y = F.linear(b, weight, bias)
    if kappa is None:
        return y + branch
    wide = upcast(y)
    if bias is None:
        plain = wide
    elif torch.is_grad_enabled():
        plain = upcast(F.linear(b, weight))  # the gate's gradient is of W b, whose digits a large bias takes from y
    else:
        plain = wide - bias
    return (wide + kappa * plain + branch).to(y.dtype)  # summed before it is rounded
