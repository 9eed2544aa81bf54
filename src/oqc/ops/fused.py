"""Feed-forward networks over the fused kernels, with merged GEMMs: the triton backend.

With C = 2 H (H for a host of one map) + 2 padded R (+ 16 for a gate per token that v's padding has no room for), T
tokens and S = [W M; P 0; 0 G] of the weights (`triton_fold`):

    proj [T, C] = x [A; B; U; V; gate]^T     one GEMM reads x
    b    [T, H] = a kernel of proj's first columns: AFBO's spatial part (`triton_spatial`), or an activation, with a
                  product where the host is gated (`triton_mix`)
    z    [T, R] = complement's kernel of b and proj's other columns (`triton_complement`), written beside b
    y    [T, D] = [b | z] [W M]^T            full OQC, and where a residual is added: W b, and another kernel

    [dy' | dt | w], du, dv, dgate = complement's kernel;   db = [dy' | dt] S,   dS, dbias = [dy' | dt | w]^T [b | z | 1]
    (full OQC: dy' = (1 + kappa) dy, and z and the 1 are kept divided by that factor)
    da, dc, their sums and the depthwise gradients = that kernel's other direction;   dx = dproj [A; B; U; V; gate]

Ranks are padded with zeros to a multiple of 8, so that every row of these buffers is aligned. The functions here take
parameters as the modules hold them, cast to autocast's dtype where it is on, and call the operators of `operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oqc.ops import norm, operators
from oqc.ops.device import DTYPES, wanted
from oqc.ops.layout import Form, gate_columns
from oqc.ops.reference import Space, full_precision

LEAST_RANK = 3  # of one dimension nothing is left but rounding, of two often little else, and kernels lose more of it
MOST_RANK = 128  # beyond it a block of tokens no longer fits a program's registers

TokenGate = tuple[Tensor, Tensor | None]  # weight [1, D] and bias [1] of a gate per token
Folded = tuple[Tensor, Tensor]  # S in the compute dtype, and in fp32


def chosen(backend: str, x: Tensor, rank: int = 0) -> bool:
    """Whether the fused operators are to run for x: wanted, and of a rank and dtype their kernels have."""
    fits = rank == 0 or LEAST_RANK <= rank <= MOST_RANK
    return fits and wanted(backend, x) and compute_dtype(x) in DTYPES


def compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, otherwise x's own (of a meta tensor, for which PyTorch has no autocast)."""
    device = x.device.type
    on = not x.is_meta and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else x.dtype


def fold(
    weights: Sequence[Tensor],  # W [D, H] of each layer
    lifts: Sequence[Tensor],  # O [H, R]
    projects: Sequence[Tensor | None],  # P [R, H], for space="rank"
    space: Space,
    dtype: torch.dtype,
) -> list[Folded]:
    """What the operators need of the weights alone, for all layers in one launch."""
    given = [item for item in projects if item is not None]
    project = _stacked(given) if given else None
    exact, stack = operators.fold(_stacked(weights), _stacked(lifts), project, space, dtype)
    return list(zip(stack.unbind(), exact.unbind(), strict=True))


def ffn_afbo(
    x: Tensor,  # [B, N, D]
    map_a: Tensor,  # A [H, D]
    map_a_bias: Tensor | None,
    map_b: Tensor,
    map_b_bias: Tensor | None,
    spatial_a: Tensor,  # [H, 1, 3, 3]
    spatial_a_bias: Tensor | None,
    spatial_b: Tensor,
    spatial_b_bias: Tensor | None,
    weight: Tensor,  # W [D, H]
    bias: Tensor | None,
    *,
    grid: tuple[int, int],
    prefix: int = 0,
    **branch: Any,  # `_network`'s, from u on
) -> Tensor | tuple[Tensor, Tensor]:
    """y = W (b + gate * delta) + bias with b = GELU(DW3x3(A x)) * DW3x3(B x): the AFBO host."""
    maps = ((map_a, map_a_bias), (map_b, map_b_bias))
    taps = (spatial_a, spatial_a_bias, spatial_b, spatial_b_bias)
    return _network(x, maps, taps, weight, bias, rows=grid[0], columns=grid[1], prefix=prefix, **branch)


def ffn_mix(
    x: Tensor,  # [..., D]
    maps: Sequence[tuple[Tensor, Tensor | None]],  # A [H, D] and its bias; for a gated host B's too
    weight: Tensor,  # W [D, H]
    bias: Tensor | None,
    *,
    act: str,  # of `plain.ACTIVATIONS`
    **branch: Any,  # `_network`'s, from u on
) -> Tensor:
    """y = W (b + gate * delta) + bias with b = act(A x), or act(A x) * B x: an MLP, or a GLU."""
    return _network(x, maps, (None,) * 4, weight, bias, mix=act, gated=len(maps) > 1, **branch)


def _network(
    x: Tensor,
    host_maps: Sequence[tuple[Tensor, Tensor | None]],
    taps: Sequence[Tensor | None],
    weight: Tensor,
    bias: Tensor | None,
    *,
    u: Tensor | None = None,  # [R, D]; None with v: the first R channels of A x and B x (of A x, twice)
    v: Tensor | None = None,
    project: Tensor | None = None,  # P [R, H]
    lift: Tensor | None = None,  # O [H, R]; None: the host alone
    gate: Tensor | TokenGate | None = None,  # its value, one number; or the map of x whose sigmoid it is
    beta: Tensor | None = None,  # instead of a gate: what it is the sigmoid of, one number
    space: Space = "rank",
    normalise: bool = True,
    eps: float = 1e-6,
    folded: Folded | None = None,  # of `fold`, where it was done for all layers at once
    residual: Tensor | None = None,  # [..., D], to be added, which gives the sum its dtype
    then: norm.Norm | None = None,  # of that sum, wanted as well (`norm.ahead`); only with a branch and a residual
    **host: Any,  # of Form: mix and gated, or the grid
) -> Any:
    if then is not None and (lift is None or residual is None):
        raise ValueError("then takes a branch and a residual: it is the norm of their sum")
    dtype = compute_dtype(x)
    rank = 0 if lift is None else lift.shape[1]
    pieces = list(host_maps)  # of weight_in and bias_in
    spare = -weight.shape[1] % 8 if lift is None else 0
    if spare:  # channels of zeros, which change nothing and align every row; a complement would count them in its norms
        pieces = [piece for one in pieces for piece in (one, *_zeros(one[0], spare))]
        taps = [None if item is None else F.pad(item, (0, 0) * (item.dim() - 1) + (0, spare)) for item in taps]
        weight = F.pad(weight, (0, spare))
    with full_precision(x):
        if lift is None:
            stack, exact = weight.to(dtype), None
        else:
            stack, exact = folded or fold([weight], [lift], [project], space, dtype)[0]
    extra = gate_columns(rank, u is None) if isinstance(gate, tuple) else 0
    if u is not None and v is not None:
        blank = _zeros(u, -rank % 8)
        last = [(rows[1:], None) for rows, _ in blank if len(rows) > 1] if extra == 1 else blank  # its logit is there
        pieces += [(u, None), *blank, (v, None), *last]
    value = None if beta is None else beta.float()
    if isinstance(gate, tuple):
        pieces += [gate, *_zeros(gate[0], extra - 1)]
    elif gate is not None:
        value = gate.float()
    bias_in = None
    if any(bias is not None for _, bias in pieces):
        nothing = None if exact is None else exact.detach()[-1, : weight.shape[1]]  # of S, left of G
        bias_in = torch.cat([_no_bias(m, nothing) if bias is None else bias for m, bias in pieces])
    weight_in = torch.cat([item for item, _ in pieces]).to(dtype)
    with full_precision(x):
        rest = None if residual is None else residual.reshape(-1, residual.shape[-1])
        tokens = x.reshape(-1, x.shape[-1]).to(dtype)
        *affine, norm_eps = then or (None, None, Form().norm_eps)
        inputs = (
            *(tokens, weight_in, bias_in, *map(_whole, taps), stack, exact, _whole(bias), value, rest),
            *(_whole(item if item is None else item.detach()) for item in affine),  # `made` has their gradient
        )
        form = Form(
            rank=rank,
            space="host" if lift is None else space,
            normalise=normalise or space == "hidden",
            gate_kind="logit" if isinstance(gate, tuple) else "scalar" if beta is None else "beta",
            shared=u is None and lift is not None,
            eps=eps,
            norm_eps=norm_eps,
            save=_may_need_grad(*inputs),
            **host,
        )
        y, *_, n, stats = operators.ffn(*inputs, *form)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if then is None else norm.made(y, n.view(y.shape), stats, then)


def ffn_complement(
    b: Tensor,  # [..., H]
    u: Tensor,  # [..., R]
    v: Tensor,
    gate: Tensor,  # [] or [..., 1]
    weight: Tensor,  # W [D, H]
    bias: Tensor | None,
    lift: Tensor,  # O [H, R]
    project: Tensor | None,  # P [R, H], for space="rank"
    *,
    space: Space,
    normalise: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """y = W (b + gate * delta) + bias for any host's hidden map b: `rankspace.output`, fused."""
    dtype = compute_dtype(b)
    with full_precision(b):
        scalar = gate.numel() == 1
        inputs = (
            _rows(b, dtype).contiguous(),
            *(_rows(item, dtype) for item in (u, v)),
            gate.float().reshape(()) if scalar else gate.float().expand(*b.shape[:-1], 1).reshape(-1),
            *fold([weight], [lift], [project], space, dtype)[0],
            _whole(bias),
        )
        form = Form(
            rank=lift.shape[1],
            space=space,
            normalise=normalise or space == "hidden",
            gate_kind="scalar" if scalar else "token",
            eps=eps,
            save=_may_need_grad(*inputs),
        )
        y = operators.complement(*inputs, *form)[0]
    return y.view(*b.shape[:-1], y.shape[-1])


def _stacked(items: Sequence[Tensor]) -> Tensor:
    return items[0].unsqueeze(0) if len(items) == 1 else torch.stack(list(items))


def _zeros(like: Tensor, count: int) -> list[tuple[Tensor, None]]:
    """Rows of zeros as a piece of their own, if any: the gradient of a padded map would be copied once more."""
    return [(like.new_zeros(count, like.shape[1]), None)] if count else []


def _no_bias(m: Tensor, nothing: Tensor | None) -> Tensor:
    """Zeros for a map without a bias: of those that are there, where they are enough, which takes no launch."""
    count = m.shape[0]
    if nothing is None or nothing.dtype != m.dtype or count > len(nothing):
        return m.new_zeros(count)
    return nothing[:count]


def _whole(x: Tensor | None) -> Tensor | None:
    """Contiguous: kernels read a bias or a depthwise map item by item from its address on."""
    return None if x is None else x.contiguous()


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., n] as [T, n], with any distance between rows."""
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _may_need_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(item is not None and item.requires_grad for item in tensors)
