"""The complement in one kernel per direction: from b, u, v to the network's output, in rank space.

With S = [W; P] stacked (full OQC: [W; O^T]), G = O^T O and M = W O (`rankspace` has the identity), per token:

    t = P b (full: O^T b)   and   q = RMSNorm(u * v)   give   kappa, z   as in `rankspace.coefficients`
    y = (1 + kappa) W b + M z + bias

A program takes a block of tokens. In half precision one GEMM against S gives W b and t, and the kernel goes on from
there; in fp32 it computes t itself, with three tf32 products for one. The backward recomputes everything
of rank size from u, v and t. It writes [(1 + kappa) dy | dt] side by side, so that one GEMM against S yields db and one
against b the gradients of W and P. Ranks are padded to a power of two and masked; everything is fp32 inside. Gradients
of G, bias and gate are per-program partials added in a fixed order: no atomics, bit-reproducible.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.ops.triton_spatial import processors
from oqc.ops.triton_sums import column_sums

HIDDEN, RANK, NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SCALAR, TOKEN, LOGIT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
SPACES = {"hidden": 0, "rank": 1, "none": 2}
GATES = {"scalar": 0, "token": 1, "logit": 2}

PROGRAMS_PER_SM = 2  # of the backward, which walks over the token blocks


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b; the interpreter would multiply bf16 as bit patterns."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _rms_norm(x, width: tl.constexpr, eps):
    """RMSNorm(x) and 1 / rms."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    return x * scale[:, None], scale


@triton.jit
def _rms_norm_grad(dy, y, scale, width: tl.constexpr):
    return scale[:, None] * (dy - y * (tl.sum(dy * y, 1) / width)[:, None])


@triton.jit
def _energy(q, gram, PRECISION: tl.constexpr):
    """G q and q^T G q = |O q|^2."""
    gq = tl.dot(q, gram, input_precision=PRECISION)
    return gq, tl.maximum(tl.sum(gq * q, 1), 0.0)


@triton.jit
def _against_main(q, t, rank: tl.constexpr, eps):
    """Eqs. 4 and 5: m = RMSNorm(t), the share of q along it, and the rest, normalised."""
    m, m_scale = _rms_norm(t, rank, eps)
    main = tl.sum(m * m, 1) + eps
    share = tl.sum(q * m, 1) / main
    p, p_scale = _rms_norm(q - share[:, None] * m, rank, eps)
    return m, m_scale, main, share, p, p_scale


@triton.jit
def _against_main_grad(dp, q, m, m_scale, main, share, p, p_scale, rank: tl.constexpr):
    dr = _rms_norm_grad(dp, p, p_scale, rank)
    dshare = -tl.sum(dr * m, 1) / main
    dq = dr + dshare[:, None] * m
    dm = dshare[:, None] * q - share[:, None] * dr - (2.0 * dshare * share)[:, None] * m
    return dq, _rms_norm_grad(dm, m, m_scale, rank)


@triton.jit
def _full(q, t, power, energy, hidden: tl.constexpr, eps):
    """The scalars of full OQC: 1 / rho_a, 1 / rho_b, <q, t>, <a, m>, |m|^2, c, |a - c m|^2, 1 / rho_r."""
    scale_a = tl.rsqrt(energy / hidden + eps)
    scale_b = tl.rsqrt(power / hidden + eps)
    qt = tl.sum(q * t, 1)
    inner = qt * scale_a * scale_b
    main = power * scale_b * scale_b
    c = inner / (main + eps)
    rest = energy * scale_a * scale_a - 2.0 * c * inner + c * c * main
    scale_r = tl.rsqrt(tl.maximum(rest, 0.0) / hidden + eps)
    return scale_a, scale_b, qt, inner, main, c, rest, scale_r


@triton.jit
def _full_grad(dzq, dkappa, gate, power, energy, scalars, hidden: tl.constexpr, eps):
    """From <dz, q> and dkappa: gradients of the gate, <q, t>, |b|^2 and q^T G q."""
    scale_a, scale_b, qt, inner, main, c, rest, scale_r = scalars
    dgate = scale_a * scale_r * dzq - c * scale_b * scale_r * dkappa
    da = gate * scale_r * dzq
    db = -gate * c * scale_r * dkappa
    dc = -gate * scale_b * scale_r * dkappa
    dr = gate * (scale_a * dzq - c * scale_b * dkappa)
    drest = tl.where(rest >= 0.0, -0.5 * dr * scale_r * scale_r * scale_r / hidden, 0.0)
    dc += drest * 2.0 * (c * main - inner)
    dinner = -2.0 * c * drest + dc / (main + eps)
    dmain = c * c * drest - dc * c / (main + eps)
    da += 2.0 * energy * scale_a * drest + dinner * qt * scale_b
    db += 2.0 * power * scale_b * dmain + dinner * qt * scale_a
    denergy = drest * scale_a * scale_a - 0.5 * da * scale_a * scale_a * scale_a / hidden
    dpower = dmain * scale_b * scale_b - 0.5 * db * scale_b * scale_b * scale_b / hidden
    return dgate, dinner * scale_a * scale_b, dpower, denergy


@triton.jit
def _load_gate(gate, first, row, live, gate_row: tl.constexpr, GATE: tl.constexpr):
    if GATE == SCALAR:
        return tl.load(gate).to(tl.float32) + tl.zeros_like(row).to(tl.float32)
    value = tl.load(gate + first * gate_row + row * gate_row, mask=live, other=0.0).to(tl.float32)
    if GATE == LOGIT:
        value = 1.0 / (1.0 + tl.exp(-value))
    return value


@triton.jit
def _load_rows(base, row, live, stride: tl.constexpr, column, limit: tl.constexpr):
    at = base + row[:, None] * stride + column[None, :]
    return tl.load(at, mask=live[:, None] & (column < limit)[None, :], other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _complement_forward(
    b,  # [T, H]
    u,  # [T, R]
    v,
    gate,
    stack,  # S [D + padded R, H]
    merged,  # M [D, padded R]
    gram,  # G [padded R, padded R] fp32
    bias,  # [D]
    host,  # W b [T, D], row stride host_row
    y,  # [T, D]
    z,  # [T, padded R], where SAVE
    given,  # P b or O^T b [T, padded R], row stride host_row, where GIVEN
    t,  # [T, padded R], where SAVE
    power,  # |b|^2 [T] fp32, where SAVE
    tokens,
    eps,
    hidden: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,  # of u and v: R, or padded R with zeros
    u_row: tl.constexpr,
    v_row: tl.constexpr,
    gate_row: tl.constexpr,
    host_row: tl.constexpr,
    SPACE: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE: tl.constexpr,
    GIVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    row = tl.arange(0, BLOCK_T)  # within the block
    live = row < tokens - first
    r = tl.arange(0, BLOCK_R)
    half = b.dtype.element_ty
    main = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    size = tl.zeros([BLOCK_T], tl.float32)
    if GIVEN:
        main = _load_rows(given + first * host_row, row, live, host_row, r, padded).to(tl.float32)
    if SPACE == HIDDEN or (SPACE == RANK and not GIVEN):
        for start in range(0, hidden, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            b_k = _load_rows(b + first * hidden, row, live, hidden, k, hidden)
            if not GIVEN:
                p_k = _load_rows(stack + width * hidden, r, r < padded, hidden, k, hidden)
                main = _dot(b_k, tl.trans(p_k), main, PRECISION)
            if SPACE == HIDDEN:
                size += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
    u_r = _load_rows(u + first * u_row, row, live, u_row, r, columns).to(tl.float32)
    v_r = _load_rows(v + first * v_row, row, live, v_row, r, columns).to(tl.float32)
    q, _ = _rms_norm(u_r * v_r, rank, eps)
    g = _load_gate(gate, first, row, live, gate_row, GATE)
    scale = g
    if SPACE == RANK:
        _m, _ms, _mm, _share, q, _ps = _against_main(q, main, rank, eps)
    if NORMALISE:
        _gq, energy = _energy(q, _load_rows(gram, r, r < padded, padded, r, padded), PRECISION)
        if SPACE == HIDDEN:
            scale_a, scale_b, _qt, _inner, _main, c, _rest, scale_r = _full(q, main, size, energy, hidden, eps)
            keep = 1.0 - g * c * scale_b * scale_r  # 1 + kappa
            scale = g * scale_a * scale_r
        else:
            scale = g * tl.rsqrt(energy / hidden + eps)
    z_r = (scale[:, None] * q).to(half)
    wide = live[:, None] & (r < padded)[None, :]
    if SAVE:
        tl.store(z + first * padded + row[:, None] * padded + r[None, :], z_r, mask=wide)
        if SPACE != NONE:
            tl.store(t + first * padded + row[:, None] * padded + r[None, :], main.to(t.dtype.element_ty), mask=wide)
        if SPACE == HIDDEN:
            tl.store(power + first + row, size, mask=live)
    for start in range(0, width, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        m_d = _load_rows(merged, d, d < width, padded, r, padded)
        branch = _dot(z_r, tl.trans(m_d), tl.zeros([BLOCK_T, BLOCK_D], tl.float32), PRECISION)
        at = row[:, None] * width + d[None, :]
        inside = live[:, None] & (d < width)[None, :]
        wb_at = host + first * host_row + row[:, None] * host_row + d[None, :]
        wb = tl.load(wb_at, mask=inside, other=0.0).to(tl.float32)
        if SPACE == HIDDEN:
            wb = keep[:, None] * wb
        value = wb + branch
        if HAS_BIAS:
            value += tl.load(bias + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
        tl.store(y + first * width + at, value.to(half), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _complement_backward(
    dy,  # [T, D]
    host,  # W b [T, D], full only
    u,
    v,
    gate,
    t,  # [T, padded R]
    power,  # [T] fp32, full only
    merged,  # M [D, padded R]
    gram,
    du,  # [T, columns]
    dv,
    stacked,  # [(1 + kappa) dy | dt]: [T, D + padded R]
    dpower,  # [T] fp32, full only
    dgate,  # [T] (token), [T, 16] (logit), else unused
    part,  # [programs, padded R * padded R + 1] fp32: of dG, then of the gate's gradient
    bias_part,  # [token blocks, D] fp32
    tokens,
    eps,
    hidden: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,  # of u and v: R, or padded R with zeros
    u_row: tl.constexpr,
    v_row: tl.constexpr,
    du_row: tl.constexpr,
    dv_row: tl.constexpr,
    gate_row: tl.constexpr,
    dgate_row: tl.constexpr,
    host_row: tl.constexpr,
    SPACE: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid = tl.program_id(0)
    row = tl.arange(0, BLOCK_T)  # within the block
    r = tl.arange(0, BLOCK_R)
    half = dy.dtype.element_ty
    gram_acc = tl.zeros([BLOCK_R, BLOCK_R], tl.float32)
    gate_acc = tl.zeros([BLOCK_T], tl.float32)
    if NORMALISE:
        gram_r = _load_rows(gram, r, r < padded, padded, r, padded)
    for block in range(pid, tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
        first = block * tl.full([], BLOCK_T, tl.int64)
        live = row < tokens - first
        u_r = _load_rows(u + first * u_row, row, live, u_row, r, columns).to(tl.float32)
        v_r = _load_rows(v + first * v_row, row, live, v_row, r, columns).to(tl.float32)
        q, q_scale = _rms_norm(u_r * v_r, rank, eps)
        g = _load_gate(gate, first, row, live, gate_row, GATE)
        if SPACE != NONE:
            t_r = _load_rows(t + first * padded, row, live, padded, r, padded).to(tl.float32)
        p = q
        if SPACE == RANK:
            m, m_scale, main, share, p, p_scale = _against_main(q, t_r, rank, eps)
        if NORMALISE:
            gp, energy = _energy(p, gram_r, PRECISION)
        if SPACE == HIDDEN:
            size = tl.load(power + first + row, mask=live, other=0.0)
            scalars = _full(q, t_r, size, energy, hidden, eps)
            scale_a, scale_b, _qt, _inner, _main, c, _rest, scale_r = scalars
            keep = 1.0 - g * c * scale_b * scale_r  # 1 + kappa
        out = stacked + first * (width + padded)
        dz = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        dkappa = tl.zeros([BLOCK_T], tl.float32)
        for start in range(0, width, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            dy_d = _load_rows(dy + first * width, row, live, width, d, width)
            m_d = _load_rows(merged, d, d < width, padded, r, padded)
            dz = _dot(dy_d, m_d, dz, PRECISION)
            inside = live[:, None] & (d < width)[None, :]
            if HAS_BIAS:
                tl.store(bias_part + block * width + d, tl.sum(dy_d.to(tl.float32), 0), mask=d < width)
            if SPACE == HIDDEN:
                wb = _load_rows(host + first * host_row, row, live, host_row, d, width)
                dkappa += tl.sum(dy_d.to(tl.float32) * wb.to(tl.float32), 1)
                dy_d = (keep[:, None] * dy_d.to(tl.float32)).to(half)
            if SPACE != NONE:
                tl.store(out + row[:, None] * (width + padded) + d[None, :], dy_d, mask=inside)
        dzp = tl.sum(dz * p, 1)
        if SPACE == HIDDEN:
            dg, dqt, dsize, denergy = _full_grad(dzp, dkappa, g, size, energy, scalars, hidden, eps)
            dp = (g * scale_a * scale_r)[:, None] * dz + dqt[:, None] * t_r
            dt = dqt[:, None] * q
            tl.store(dpower + first + row, dsize, mask=live)
        elif NORMALISE:
            scale = tl.rsqrt(energy / hidden + eps)
            dg = scale * dzp
            denergy = -0.5 * g * dzp * scale * scale * scale / hidden
            dp = (g * scale)[:, None] * dz
        else:
            dg = dzp
            dp = g[:, None] * dz
        if NORMALISE:
            dp += (2.0 * denergy)[:, None] * gp
            gram_acc = _dot(tl.trans(denergy[:, None] * p), p, gram_acc, PRECISION)
        if SPACE == RANK:
            dp, dt = _against_main_grad(dp, q, m, m_scale, main, share, p, p_scale, rank)
        if SPACE != NONE:
            at = out + row[:, None] * (width + padded) + width + r[None, :]
            tl.store(at, dt.to(half), mask=live[:, None] & (r < padded)[None, :])
        ds = _rms_norm_grad(dp, q, q_scale, rank)
        wide = live[:, None] & (r < columns)[None, :]
        tl.store(du + first * du_row + row[:, None] * du_row + r[None, :], (ds * v_r).to(half), mask=wide)
        tl.store(dv + first * dv_row + row[:, None] * dv_row + r[None, :], (ds * u_r).to(half), mask=wide)
        if GATE == TOKEN:
            tl.store(dgate + first * dgate_row + row * dgate_row, dg, mask=live)
        if GATE == LOGIT:
            dg = dg * g * (1.0 - g)
            lane = tl.arange(0, 16)
            block16 = tl.where(lane[None, :] == 0, dg[:, None], 0.0)
            at = dgate + first * dgate_row + row[:, None] * dgate_row + lane[None, :]
            tl.store(at, block16.to(dgate.dtype.element_ty), mask=live[:, None] & (lane < 16)[None, :])
        gate_acc += tl.where(live, dg, 0.0)
    part += pid.to(tl.int64) * (padded * padded + 1)
    tl.store(part + padded * padded, tl.sum(gate_acc, 0))
    if NORMALISE:
        at = part + r[:, None] * padded + r[None, :]
        tl.store(at, gram_acc, mask=(r < padded)[:, None] & (r < padded)[None, :])


def forward(
    b: Tensor,  # [T, H], contiguous
    u: Tensor,  # [T, R], or padded with zeros; any row stride
    v: Tensor,
    gate: Tensor,  # [] (scalar), [T] values (token) or logits (logit), any stride
    stack: Tensor,  # S [D + padded R, H]; without the tail where space is "none"
    merged: Tensor,  # M [D, padded R]
    gram: Tensor,  # G [padded R, padded R] fp32
    bias: Tensor | None,
    *,
    rank: int,
    space: str,
    normalise: bool,
    gate_kind: str,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [T, D], and what the backward needs: z, t, |b|^2 and W b (each empty where it does not)."""
    (tokens, hidden), (width, padded) = b.shape, merged.shape
    half = b.dtype != torch.float32
    given = half and space != "none"  # one GEMM gives W b and P b
    block_r = max(16, triton.next_power_of_2(padded))
    host = b @ (stack if given else stack[:width]).T
    y = b.new_empty(tokens, width)
    kept = tokens if save else 0
    z = b.new_empty(kept, padded)
    t = b.new_empty(kept if space != "none" else 0, padded, dtype=b.dtype if given else torch.float32)
    power = b.new_empty(kept if space == "hidden" else 0, dtype=torch.float32)
    block_t = 64 if half and block_r <= 64 else 32
    _complement_forward[(triton.cdiv(tokens, block_t),)](
        b,
        u,
        v,
        gate,
        stack,
        merged,
        gram,
        gram if bias is None else bias,
        host,
        y,
        z,
        host[:, width:] if given else host,
        t,
        power,
        tokens,
        eps,
        hidden,
        rank,
        padded,
        width,
        u.shape[1],
        u.stride(0),
        v.stride(0),
        gate.stride(0) if gate.dim() else 0,
        host.stride(0),
        SPACE=SPACES[space],
        NORMALISE=normalise,
        GATE=GATES[gate_kind],
        HAS_BIAS=bias is not None,
        SAVE=save,
        GIVEN=given,
        PRECISION="tf32" if half else "tf32x3",
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_K=64 if half else 32,
        BLOCK_D=64 if half else 32,
        num_warps=4,
        num_stages=3 if half else 2,
    )
    return y, z, t, power, host if space == "hidden" and save else b.new_empty(0)


def backward(
    dy: Tensor,  # [T, D], contiguous
    host: Tensor,
    u: Tensor,
    v: Tensor,
    gate: Tensor,
    t: Tensor,
    power: Tensor,
    merged: Tensor,
    gram: Tensor,
    bias: bool,
    *,
    hidden: int,
    rank: int,
    space: str,
    normalise: bool,
    gate_kind: str,
    eps: float,
    du: Tensor,
    dv: Tensor,
    dgate: Tensor | None,  # [T] (token), or the 16 columns that begin with the logit
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Writes du, dv and a token's dgate. Returns [(1 + kappa) dy | dt] (dy itself where space is "none"), the gradient
    of |b|^2 (full only), dG, the gate's summed gradient and the bias's, the last three in fp32."""
    (tokens, width), padded = dy.shape, merged.shape[1]
    half = dy.dtype != torch.float32
    block_r = max(16, triton.next_power_of_2(padded))
    block_t = 64 if half and block_r <= 64 else 32
    blocks = triton.cdiv(tokens, block_t)
    programs = min(blocks, PROGRAMS_PER_SM * processors(dy.device))
    fp32: dict[str, Any] = {"device": dy.device, "dtype": torch.float32}
    stacked = dy.new_empty(tokens, width + padded) if space != "none" else dy
    dpower = torch.empty(tokens, **fp32) if space == "hidden" else None
    part = (torch.empty if normalise else torch.zeros)(programs, padded * padded + 1, **fp32)
    bias_part = torch.empty(blocks if bias else 0, width, **fp32)
    _complement_backward[(programs,)](
        dy,
        host,
        u,
        v,
        gate,
        t,
        power,
        merged,
        gram,
        du,
        dv,
        stacked,
        part if dpower is None else dpower,
        part if dgate is None else dgate,
        part,
        bias_part,
        tokens,
        eps,
        hidden,
        rank,
        padded,
        width,
        u.shape[1],
        u.stride(0),
        v.stride(0),
        du.stride(0),
        dv.stride(0),
        gate.stride(0) if gate.dim() else 0,
        0 if dgate is None else dgate.stride(0),
        host.stride(0),
        SPACE=SPACES[space],
        NORMALISE=normalise,
        GATE=GATES[gate_kind],
        HAS_BIAS=bias,
        PRECISION="tf32" if half else "tf32x3",
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_D=128 if half and block_r > 64 else 64 if half else 32,
        num_warps=8 if block_r > 64 else 4,
        num_stages=1 if block_r > 64 else 2,
    )
    sums = column_sums(part)
    dgram, gate_sum = sums[:-1].view(padded, padded), sums[-1].clone()  # results may not share memory
    return stacked, dpower, dgram, gate_sum, column_sums(bias_part) if bias else bias_part.new_empty(0)
