"""The complement in rank space: coefficients, combination, gradients.

With S = [W M; P 0; 0 G], M = W O and G = O^T O (`triton_fold`; full OQC: O^T for P), `rankspace`'s identity per token:

    coefficients   t = P b (full: O^T b) and q = RMSNorm(u * v) give kappa and z as in `rankspace.coefficients`
    then           y = [b | z] [W M]^T + bias, one GEMM where b and z lie side by side and kappa is 0;
    combination    y = (1 + kappa) W b + M z + bias elsewhere, and where the residual is added too;
    rows           that sum and the LayerNorm of it in one, and where it has the room z as well
    gradients      dz = dy M, then [(1 + kappa) dy | dt | w], du, dv and the gate's, with q recomputed from u and v

One GEMM of the last buffer's first columns against S yields db, and one of all of it against [b | z | 1] the gradients
of S and of the bias; for full OQC z and the 1 are kept divided by 1 + kappa, since dM and dbias are sums over dy (and
the 1 is two columns, one with what the other lost in rounding: dbias would have the error of three roundings). The
gradient of G is a sum over tokens of e p p^T, p being what is left of q and z a multiple of it: w is the other factor.

A program takes a block of tokens and all of the rank, padded to a power of two and masked, and is fp32 inside, but for
what it multiplies on tensor cores: z and dy in half precision, q and G in bf16 or tf32. The gradients take two kernels,
so that neither holds many tiles of that size at once; from an fp32 dy the first only rounds it, and cuBLAS makes dz.
The gate's is one number a program, for PyTorch to add up: no atomics, bit-reproducible.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: SIM109 -- the kernels are written in Triton's subset of the language
from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.ops import triton_norm
from oqc.ops.device import processors, shared_memory
from oqc.ops.layout import aligned, cdiv, gradient_tokens, lanes

HIDDEN, RANK, NONE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SCALAR, TOKEN, LOGIT, BETA = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
SPACES = {"hidden": 0, "rank": 1, "none": 2}
GATES = {"scalar": 0, "token": 1, "logit": 2, "beta": 3}
# Triton 3.6 overlaps the iterations of a loop wrongly where a tile is both an operand of Hopper's asynchronous products
# and read by threads (as dy, which is stored too): the next tile may overwrite it too early. Such loops are not
# pipelined.
UNPIPELINED = 1
ROUNDED_TOKENS = 8  # a program
# By measurement, of programs that walk over whole rows: tokens at a time, warps, and blocks of rows on their way.
ROW_TOKENS, ROW_WARPS, ROW_STAGES = 32, 8, 3
MOST_OWN_LANES = 64  # of a rank whose z is made there too
SHORT_LOOP = 256  # as wide a dy is better read once without a pipeline than twice with one
# So far from 0 that what is divided by it stays finite, so near that rounding does not tell it from 0.
LEAST_KEEP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-24, torch.float16: 2.0**-12}


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b; the interpreter would multiply bf16 as bit patterns."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _along(ss, st, tt, rank: tl.constexpr, eps):
    """Eqs. 4 and 5 by inner products of s and t. With q = a s and m = c t, both of RMS 1: a, c, <m, m> + eps and the
    share of q along m."""
    a, c = tl.rsqrt(ss / rank + eps), tl.rsqrt(tt / rank + eps)
    main = c * c * tt + eps
    return a, c, main, a * c * st / main


@triton.jit
def _left_grad(dpr, dpt, st, left, a, c, main, share, rank: tl.constexpr, eps):
    """Of p = left r, with r = a s - share c t and left = 1 / rms(r), from dp against r and t: how much of dp, r, s and
    t is in ds, and how much of dp, r and t in dt. What the equations make 0 but for eps is written as that, since the
    difference of two large numbers would not be: <r, m>, <dq, q> and <dm, m>."""
    along = left * dpr / rank  # <dp, p> / R
    drt = left * (dpt - along * left * a * st * eps / main)  # dr, the gradient of r, against t
    dshare = -c * drt / main
    back = left * left * along
    s_s = -a * a * (eps * left * left * left * dpr / rank)
    t_t = -c * c * dshare * share * (1.0 + 2.0 * eps / rank)
    return a * left, -a * back, s_s, a * c * dshare, -c * share * left, c * (dshare + share * back), t_t


@triton.jit
def _full(qt, power, energy, hidden: tl.constexpr, eps):
    """The scalars of full OQC: 1 / rho_a, 1 / rho_b, <q, t>, <a, m>, |m|^2, c, |a - c m|^2, 1 / rho_r."""
    scale_a = tl.rsqrt(energy / hidden + eps)
    scale_b = tl.rsqrt(power / hidden + eps)
    inner = qt * scale_a * scale_b
    main = power * scale_b * scale_b
    c = inner / (main + eps)
    rest = energy * scale_a * scale_a - 2.0 * c * inner + c * c * main
    scale_r = tl.rsqrt(tl.maximum(rest, 0.0) / hidden + eps)
    return scale_a, scale_b, qt, inner, main, c, rest, scale_r


@triton.jit
def _full_grad(dzq, dkappa, power, energy, scalars, hidden: tl.constexpr, eps):
    """From <dz, q> and dkappa: gradients of the gate and, up to its factor, of <q, t>, |b|^2 and q^T G q."""
    scale_a, scale_b, qt, inner, main, c, rest, scale_r = scalars
    dgate = scale_a * scale_r * dzq - c * scale_b * scale_r * dkappa
    da = scale_r * dzq
    db = -c * scale_r * dkappa
    dc = -scale_b * scale_r * dkappa
    dr = scale_a * dzq - c * scale_b * dkappa
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
    if GATE == SCALAR or GATE == BETA:
        value = tl.load(gate).to(tl.float32) + tl.zeros_like(row).to(tl.float32)
    else:
        value = tl.load(gate + first * gate_row + row * gate_row, mask=live, other=0.0).to(tl.float32)
    if GATE == LOGIT or GATE == BETA:
        value = 1.0 / (1.0 + tl.exp(-value))
    return value


@triton.jit
def _load_rows(base, row, live, stride: tl.constexpr, column, limit: tl.constexpr):
    at = base + row[:, None] * stride + column[None, :]
    return tl.load(at, mask=live[:, None] & (column < limit)[None, :], other=0.0)


@triton.jit
def _make_z(
    s, t, g, scale, size, eps, least,
    hidden: tl.constexpr, rank: tl.constexpr,
    SPACE: tl.constexpr, NORMALISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z from s = u * v, t, G, the gate and |b|^2; G p and p^T G p, p what is left of q; and 1 + kappa."""
    ss = tl.sum(s * s, 1)
    kept = tl.full(ss.shape, 1.0, tl.float32)
    if SPACE == RANK:
        st, tt = tl.sum(s * t, 1), tl.sum(t * t, 1)
        a, c, _main, share = _along(ss, st, tt, rank, eps)
        q = a[:, None] * s - (share * c)[:, None] * t
        q = tl.rsqrt(tl.sum(q * q, 1) / rank + eps)[:, None] * q
    else:
        q = tl.rsqrt(ss / rank + eps)[:, None] * s
    gq, e = q, ss
    if NORMALISE:
        gq = _dot(q.to(g.dtype), g, tl.zeros(q.shape, tl.float32), PRECISION)
        e = tl.maximum(tl.sum(gq * q, 1), 0.0)
        if SPACE == HIDDEN:
            qt = tl.sum(q * t, 1)
            scale_a, scale_b, _qt, _inner, _main, c, _rest, scale_r = _full(qt, size, e, hidden, eps)
            kept = 1.0 - scale * c * scale_b * scale_r
            kept = tl.where(kept < 0.0, tl.minimum(kept, -least), tl.maximum(kept, least))
            scale = scale * scale_a * scale_r / kept
        else:
            scale = scale * tl.rsqrt(e / hidden + eps)
    return scale[:, None] * q, gq, e, kept


@triton.jit
def _put_z(z, z_r, one, first, row, live, r, padded: tl.constexpr, z_columns: tl.constexpr, z_row: tl.constexpr):
    """[z | 1 | 0 ...], where full OQC has 1 / (1 + kappa) and what that lost in rounding."""
    out = z + first * z_row + row[:, None] * z_row
    tl.store(out + r[None, :], z_r, mask=live[:, None] & (r < padded)[None, :])
    SPARE: tl.constexpr = 32 if z_columns <= padded + 32 else 64
    rest = padded + tl.arange(0, SPARE)[None, :] + tl.zeros_like(row)[:, None]
    kept_of_one = one.to(z.dtype.element_ty).to(tl.float32)
    ones = tl.where(rest == padded + 1, (one - kept_of_one)[:, None], 0.0)
    ones = tl.where(rest == padded, kept_of_one[:, None], ones).to(z.dtype.element_ty)
    tl.store(out + rest, ones, mask=live[:, None] & (rest < z_columns))


@triton.jit(do_not_specialize=["tokens"])
def _coefficients(
    b,  # [T, H], row stride b_row; full only
    u,  # [T, R]
    v,
    gate,
    gram,  # G [padded R, padded R] fp32 or bf16, row stride gram_row
    z,  # [T, z_columns], row stride z_row: padded R of z, a one, zeros; full: z and the one divided by keep, and in
    # the next column what the one lost in rounding
    given,  # P b, full: O^T b [T, padded R], row stride given_row
    t,  # the same, contiguous: written where SAVE_T
    gp,  # G p [T, padded R], p what is left of q, where SAVE and NORMALISE
    energy,  # p^T G p = |O p|^2 [T] fp32, likewise
    power,  # |b|^2 [T] fp32, full only
    keep,  # 1 + kappa [T] fp32, full only
    tokens,
    eps,
    least,  # |keep| is at least this
    hidden: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    columns: tl.constexpr,  # of u and v: R, or padded R with zeros
    b_row: tl.constexpr,
    u_row: tl.constexpr,
    v_row: tl.constexpr,
    gate_row: tl.constexpr,
    given_row: tl.constexpr,
    gram_row: tl.constexpr,
    z_columns: tl.constexpr,
    z_row: tl.constexpr,
    SPACE: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATE: tl.constexpr,
    SAVE: tl.constexpr,
    SAVE_T: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last first: the product before left it in the cache
    first = block.to(tl.int64) * BLOCK_T
    row = tl.arange(0, BLOCK_T)  # within the block
    live = row < tokens - first
    r = tl.arange(0, BLOCK_R)
    wide = live[:, None] & (r < padded)[None, :]
    at = row[:, None] * padded + r[None, :]
    if NORMALISE:  # the same as its transpose, but as tensor cores take it
        g = tl.trans(_load_rows(gram, r, r < padded, gram_row, r, padded))
    if SPACE != NONE:
        main = _load_rows(given + first * given_row, row, live, given_row, r, padded).to(tl.float32)
    if SPACE == HIDDEN:
        size = tl.zeros([BLOCK_T], tl.float32)
        for start in range(0, hidden, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            b_k = _load_rows(b + first * b_row, row, live, b_row, k, hidden).to(tl.float32)
            size += tl.sum(b_k * b_k, 1)
    if SAVE_T:
        tl.store(t + first * padded + at, main.to(t.dtype.element_ty), mask=wide)
    u_r = _load_rows(u + first * u_row, row, live, u_row, r, columns).to(tl.float32)
    v_r = _load_rows(v + first * v_row, row, live, v_row, r, columns).to(tl.float32)
    if GATE == LOGIT:  # it may lie in a column of v
        v_r = tl.where((r < rank)[None, :], v_r, 0.0)
    scale = _load_gate(gate, first, row, live, gate_row, GATE)
    # What a form does not read is something of a fitting kind.
    if SPACE == NONE:
        main = u_r
    if SPACE != HIDDEN:
        size = scale
    if not NORMALISE:
        g = scale
    z_r, gq, e, kept = _make_z(u_r * v_r, main, g, scale, size, eps, least, hidden, rank, SPACE, NORMALISE, PRECISION)
    if SAVE and NORMALISE:
        tl.store(gp + first * padded + at, gq.to(gp.dtype.element_ty), mask=wide)
        tl.store(energy + first + row, e, mask=live)
    if SPACE == HIDDEN:
        tl.store(keep + first + row, kept, mask=live)
        tl.store(power + first + row, size, mask=live)
    _put_z(z, z_r.to(z.dtype.element_ty), 1.0 / kept, first, row, live, r, padded, z_columns, z_row)


@triton.jit(do_not_specialize=["tokens"])
def _combination(
    host,  # W b [T, D], row stride host_row
    z,  # [T, padded R], row stride z_row
    stack,
    bias,  # [D]
    keep,  # [T] fp32, where KEEP
    residual,  # [T, D], where RESIDUAL
    y,  # [T, D]
    tokens,
    hidden: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    host_row: tl.constexpr,
    z_row: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Programs side by side share rows, which lie side by side in memory too.
    pieces: tl.constexpr = (width + BLOCK_D - 1) // BLOCK_D
    first = (tl.program_id(0) // pieces).to(tl.int64) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    live = row < tokens - first
    r = tl.arange(0, BLOCK_R)
    d = tl.program_id(0) % pieces * BLOCK_D + tl.arange(0, BLOCK_D)
    z_r = _load_rows(z + first * z_row, row, live, z_row, r, padded)
    m_d = _load_rows(stack + hidden, d, d < width, hidden + padded, r, padded)
    value = _dot(z_r, tl.trans(m_d), tl.zeros([BLOCK_T, BLOCK_D], tl.float32), PRECISION)
    value += _load_rows(host + first * host_row, row, live, host_row, d, width).to(tl.float32)
    if KEEP:
        value = tl.load(keep + first + row, mask=live, other=0.0)[:, None] * value
    if HAS_BIAS:
        value += tl.load(bias + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        value += _load_rows(residual + first * width, row, live, width, d, width).to(tl.float32)
    at = y + first * width + row[:, None] * width + d[None, :]
    tl.store(at, value.to(y.dtype.element_ty), mask=live[:, None] & (d < width)[None, :])


@triton.jit
def _neighbours(base, first, row, live, stride: tl.constexpr, column, limit: tl.constexpr):
    """Addresses of some rows, four neighbours a thread whatever the dtype (`triton_norm`), and which of them exist."""
    at = base + first * stride + row[:, None] * stride + column[None, :]
    return tl.max_contiguous(at, [1, 4]), live[:, None] & (column < limit)[None, :]


@triton.jit(do_not_specialize=["tokens"])
def _rows(
    u,  # as `_coefficients` has them, where OWN_Z; else z and keep are there already
    v,
    gate,
    gram,
    z,
    given,
    t,
    gp,
    energy,
    keep,
    host,  # W b [T, D], row stride given_row
    stack,
    bias,  # [D]
    residual,  # [T, D] fp32
    gamma,  # of the norm [D] fp32, and beta
    beta,
    y,  # residual + output [T, D] fp32
    n,  # its norm [T, D]
    stats,  # its mean and 1 / standard deviation [2, T] fp32
    tokens,
    eps,
    norm_eps,
    hidden: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    u_row: tl.constexpr,
    v_row: tl.constexpr,
    gate_row: tl.constexpr,
    given_row: tl.constexpr,
    gram_row: tl.constexpr,
    z_columns: tl.constexpr,
    z_row: tl.constexpr,
    OWN_Z: tl.constexpr,  # not for full
    SPACE: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATE: tl.constexpr,
    SAVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program keeps G and M and walks over blocks of rows, the next ones on their way while it works on one."""
    row = tl.arange(0, BLOCK_T)
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    there = d < width
    if OWN_Z and NORMALISE:
        g = tl.trans(_load_rows(gram, r, r < padded, gram_row, r, padded))
    m = tl.trans(_load_rows(stack + hidden, d, there, hidden + padded, r, padded))
    factor, shift = tl.load(gamma + d, mask=there, other=0.0), tl.load(beta + d, mask=there, other=0.0)
    plus = tl.zeros([BLOCK_D], tl.float32)
    if HAS_BIAS:
        plus = tl.load(bias + d, mask=there, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    step = tl.num_programs(0) * BLOCK_T
    for _ in tl.range(tl.program_id(0) * BLOCK_T, tokens, step, num_stages=STAGES):
        live = row < tokens - first
        at, mask = _neighbours(host, first, row, live, given_row, d, width)
        host_d = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at, mask = _neighbours(residual, first, row, live, width, d, width)
        rest = tl.load(at, mask=mask, other=0.0) + plus[None, :]
        if OWN_Z:
            u_r = _load_rows(u + first * u_row, row, live, u_row, r, columns).to(tl.float32)
            v_r = _load_rows(v + first * v_row, row, live, v_row, r, columns).to(tl.float32)
            t_r = u_r
            if SPACE == RANK:
                given_r = _load_rows(given + first * given_row, row, live, given_row, r, padded)
                t_r = given_r.to(tl.float32)
            if GATE == LOGIT:  # it may lie in a column of v
                v_r = tl.where((r < rank)[None, :], v_r, 0.0)
            scale = _load_gate(gate, first, row, live, gate_row, GATE)
            if not NORMALISE:
                g = scale  # not read
            z_r, gq, e, one = _make_z(
                u_r * v_r, t_r, g, scale, scale, eps, 0.0, hidden, rank, SPACE, NORMALISE, PRECISION
            )
            z_r = z_r.to(z.dtype.element_ty)
            if SAVE:
                at = first * padded + row[:, None] * padded + r[None, :]
                mask = live[:, None] & (r < padded)[None, :]
                if SPACE == RANK:
                    tl.store(t + at, given_r, mask=mask)
                if NORMALISE:
                    tl.store(gp + at, gq.to(gp.dtype.element_ty), mask=mask)
                    tl.store(energy + first + row, e, mask=live)
                _put_z(z, z_r, one, first, row, live, r, padded, z_columns, z_row)
        else:
            z_r = _load_rows(z + first * z_row, row, live, z_row, r, padded)
        value = _dot(z_r, m, tl.zeros([BLOCK_T, BLOCK_D], tl.float32), PRECISION)
        if SPACE == HIDDEN:
            value = tl.load(keep + first + row, mask=live, other=0.0)[:, None] * (value + host_d) + rest
        else:
            value += host_d + rest
        at, mask = _neighbours(y, first, row, live, width, d, width)
        tl.store(at, value, mask=mask)
        mean = tl.sum(value, 1) / width
        left = tl.where(there[None, :], value - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(left * left, 1) / width + norm_eps)
        normed = left * rstd[:, None] * factor[None, :] + shift[None, :]
        at, mask = _neighbours(n, first, row, live, width, d, width)
        tl.store(at, normed.to(n.dtype.element_ty), mask=mask)
        tl.store(stats + first + row, mean, mask=live)
        tl.store(stats + tokens + first + row, rstd, mask=live)
        first += step


@triton.jit(do_not_specialize=["tokens"])
def _gradient_of_z(
    dy,  # [T, D], of any dtype
    host,  # W b [T, D], row stride host_row; full only
    keep,  # [T] fp32, full only
    stack,
    stacked,  # [(1 + kappa) dy | ... | dz], row stride stacked_row
    dkappa,  # [T] fp32, full only
    tokens,
    hidden: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    used: tl.constexpr,  # columns of stacked
    host_row: tl.constexpr,
    stacked_row: tl.constexpr,
    KEEP: tl.constexpr,
    APART: tl.constexpr,  # whether the product has a loop of its own
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    row = tl.arange(0, BLOCK_T)  # within the block
    live = row < tokens - first
    r = tl.arange(0, BLOCK_R)
    out = stacked + first * stacked_row + row[:, None] * stacked_row
    dz = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    if KEEP:
        along = tl.zeros([BLOCK_T], tl.float32)
        scale = tl.load(keep + first + row, mask=live, other=0.0)[:, None]
    if APART:
        for start in range(0, width, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            dy_d = _load_rows(dy + first * width, row, live, width, d, width).to(stacked.dtype.element_ty)
            m_d = _load_rows(stack + hidden, d, d < width, hidden + padded, r, padded)
            dz = _dot(dy_d, m_d, dz, PRECISION)
    for start in range(0, width, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        dy_d = _load_rows(dy + first * width, row, live, width, d, width).to(stacked.dtype.element_ty)
        if not APART:
            m_d = _load_rows(stack + hidden, d, d < width, hidden + padded, r, padded)
            dz = _dot(dy_d, m_d, dz, PRECISION)
        if KEEP:
            wb = _load_rows(host + first * host_row, row, live, host_row, d, width)
            along += tl.sum(dy_d.to(tl.float32) * wb.to(tl.float32), 1)
            dy_d = (scale * dy_d.to(tl.float32)).to(stacked.dtype.element_ty)
        tl.store(out + d[None, :], dy_d, mask=live[:, None] & (d < width)[None, :])
    if KEEP:
        tl.store(dkappa + first + row, along, mask=live)
    at = out + (used - padded) + r[None, :]
    tl.store(at, dz.to(stacked.dtype.element_ty), mask=live[:, None] & (r < padded)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _rounded(
    dy,  # [T, D] fp32
    host,  # W b [T, D], row stride host_row; full only
    keep,  # [T] fp32, full only
    stacked,  # [(1 + kappa) dy | ...], row stride stacked_row
    dkappa,  # [T] fp32, full only
    tokens,
    width: tl.constexpr,
    host_row: tl.constexpr,
    stacked_row: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The first columns of stacked, for cuBLAS to make dz of: reading fp32 leaves no time to multiply in between."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    live = row < tokens - first
    out = stacked + first * stacked_row + row[:, None] * stacked_row
    if KEEP:
        along = tl.zeros([BLOCK_T], tl.float32)
        scale = tl.load(keep + first + row, mask=live, other=0.0)[:, None]
    for start in range(0, width, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        dy_d = _load_rows(dy + first * width, row, live, width, d, width)
        if KEEP:
            along += tl.sum(dy_d * _load_rows(host + first * host_row, row, live, host_row, d, width).to(tl.float32), 1)
            dy_d = scale * dy_d
        tl.store(out + d[None, :], dy_d.to(stacked.dtype.element_ty), mask=live[:, None] & (d < width)[None, :])
    if KEEP:
        tl.store(dkappa + first + row, along, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _gradients(
    stacked,  # [(1 + kappa) dy | ... | dz] comes in, [(1 + kappa) dy | dt | w] leaves; row stride stacked_row
    dkappa,  # [T] fp32, full only
    u,
    v,
    gate,
    t,  # [T, padded R], row stride t_row
    gp,
    energy,
    power,
    keep,  # [T] fp32, full only
    du,  # [T, columns]
    dv,
    dpower,  # [T] fp32, full only
    dgate,  # [T] (token), [T, 16] (logit; LAST: that is the last column of dv), else unused
    parts,  # [programs] fp32: of the gate's gradient
    tokens,
    eps,
    hidden: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,  # of u and v: R, or padded R with zeros
    u_row: tl.constexpr,
    v_row: tl.constexpr,
    t_row: tl.constexpr,
    du_row: tl.constexpr,
    dv_row: tl.constexpr,
    gate_row: tl.constexpr,
    dgate_row: tl.constexpr,
    used: tl.constexpr,
    stacked_row: tl.constexpr,
    SPACE: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATE: tl.constexpr,
    LAST: tl.constexpr,
    SCALED: tl.constexpr,  # dz has the factor 1 + kappa
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    first = block * BLOCK_T
    row = tl.arange(0, BLOCK_T)  # within the block
    live = row < tokens - first
    r = tl.arange(0, BLOCK_R)
    half = du.dtype.element_ty
    out = stacked + first * stacked_row
    dz = _load_rows(out + (used - padded), row, live, stacked_row, r, padded).to(tl.float32)
    if SPACE == HIDDEN:
        kept = tl.load(keep + first + row, mask=live, other=1.0)
        if SCALED:
            dz = dz / kept[:, None]
    u_r = _load_rows(u + first * u_row, row, live, u_row, r, columns).to(tl.float32)
    v_r = _load_rows(v + first * v_row, row, live, v_row, r, columns).to(tl.float32)
    if GATE == LOGIT:  # it may lie in a column of v
        v_r = tl.where((r < rank)[None, :], v_r, 0.0)
    s = u_r * v_r
    g = _load_gate(gate, first, row, live, gate_row, GATE)
    # Every result is a combination of dz, G p, s, t and what is left of s, with factors of a token.
    ss = tl.sum(s * s, 1)
    if SPACE != NONE:
        t_r = _load_rows(t + first * t_row, row, live, t_row, r, padded).to(tl.float32)
        st = tl.sum(s * t_r, 1)
    if NORMALISE:
        gp_r = _load_rows(gp + first * padded, row, live, padded, r, padded).to(tl.float32)
        e = tl.load(energy + first + row, mask=live, other=0.0)
    if SPACE == RANK:  # p = left rest
        a, c, main, share = _along(ss, st, tl.sum(t_r * t_r, 1), rank, eps)
        rest = a[:, None] * s - (share * c)[:, None] * t_r
        left = tl.rsqrt(tl.sum(rest * rest, 1) / rank + eps)
    else:
        rest = s
        left = tl.rsqrt(ss / rank + eps)
    zr = tl.sum(dz * rest, 1)
    dzp = left * zr
    scale = tl.full([BLOCK_T], 1.0, tl.float32)
    denergy = tl.zeros([BLOCK_T], tl.float32)  # lacks the gate's factor: z has it
    dqt = tl.zeros([BLOCK_T], tl.float32)
    if SPACE == HIDDEN:
        size = tl.load(power + first + row, mask=live, other=0.0)
        full = _full(left * st, size, e, hidden, eps)
        scale = full[0] * full[7]
        dk = tl.load(dkappa + first + row, mask=live, other=0.0)
        dg, dqt, dsize, denergy = _full_grad(dzp, dk, size, e, full, hidden, eps)
        tl.store(dpower + first + row, g * dsize, mask=live)
        dqt = g * dqt
    elif NORMALISE:
        scale = tl.rsqrt(e / hidden + eps)
        dg = scale * dzp
        denergy = -0.5 * dzp * scale * scale * scale / hidden
    else:
        dg = dzp
    z_part, g_part = g * scale, 2.0 * g * denergy  # dp = z_part dz + g_part G p (full: + dqt t)
    dpr = z_part * zr
    if NORMALISE:
        dpr += g_part * tl.sum(gp_r * rest, 1)
    if SPACE == RANK:
        dpt = z_part * tl.sum(dz * t_r, 1)
        if NORMALISE:
            dpt += g_part * tl.sum(gp_r * t_r, 1)
        s_p, s_rest, s_s, s_t, t_p, t_rest, t_t = _left_grad(dpr, dpt, st, left, a, c, main, share, rank, eps)
    else:
        if SPACE == HIDDEN:
            dpr += dqt * st
        s_p, s_rest, s_t = left, -left * left * left * dpr / rank, left * dqt
    wide = live[:, None] & (r < padded)[None, :]
    at = out + row[:, None] * stacked_row + r[None, :]
    dp = z_part[:, None] * dz
    if NORMALISE:
        dp += g_part[:, None] * gp_r
        factor = denergy / scale
        if SPACE == HIDDEN:  # z is kept divided by it
            factor *= kept
        w = (factor * left)[:, None] * rest
    else:
        w = tl.zeros_like(s)
    tl.store(at + (used - padded), w.to(half), mask=wide)
    ds = s_p[:, None] * dp + s_rest[:, None] * rest
    if SPACE != NONE:
        ds += s_t[:, None] * t_r
        if SPACE == RANK:
            ds += s_s[:, None] * s
            dt = t_p[:, None] * dp + t_rest[:, None] * rest + t_t[:, None] * t_r
        else:
            dt = (dqt * left)[:, None] * s
        tl.store(at + width, dt.to(half), mask=wide)
    wide = live[:, None] & (r < columns)[None, :]
    if GATE == TOKEN:
        tl.store(dgate + first * dgate_row + row * dgate_row, dg, mask=live)
    if GATE == LOGIT or GATE == BETA:
        dg = dg * g * (1.0 - g)
    dv_r = ds * u_r
    if LAST:  # u and ds are 0 there
        dv_r = tl.where((r == columns - 1)[None, :], dg[:, None], dv_r)
    tl.store(du + first * du_row + row[:, None] * du_row + r[None, :], (ds * v_r).to(half), mask=wide)
    tl.store(dv + first * dv_row + row[:, None] * dv_row + r[None, :], dv_r.to(half), mask=wide)
    if GATE == LOGIT and not LAST:
        lane = tl.arange(0, 16)
        block16 = tl.where(lane[None, :] == 0, dg[:, None], 0.0)
        to = dgate + first * dgate_row + row[:, None] * dgate_row + lane[None, :]
        tl.store(to, block16.to(dgate.dtype.element_ty), mask=live[:, None])
    tl.store(parts + block, tl.sum(tl.where(live, dg, 0.0), 0))


class Saved(NamedTuple):
    """What the gradients need of the forward, each empty where there is none."""

    t: Tensor  # P b [T, padded R]; not for full
    gp: Tensor  # G p [T, padded R], with p what is left of q
    energy: Tensor  # p^T G p = |O p|^2 [T] fp32
    power: Tensor  # |b|^2 [T] fp32, full only
    keep: Tensor  # 1 + kappa [T] fp32, full only

    @classmethod
    def of(cls, b: Tensor, padded: int, space: str, normalise: bool, save: bool, t: Tensor | None) -> Saved:
        def wide(wanted: bool) -> Tensor:
            return b.new_empty(b.shape[0] if wanted else 0, padded)

        def numbers(wanted: bool) -> Tensor:
            return b.new_empty(b.shape[0] if wanted else 0, dtype=torch.float32)

        full, again = space == "hidden", save and normalise
        t = wide(save and space == "rank") if t is None else t
        return cls(t, wide(again), numbers(again), numbers(full), numbers(full))


def coefficients(
    b: Tensor,  # [T, H], any row stride
    u: Tensor,  # [T, R], or padded with zeros; any row stride
    v: Tensor,
    gate: Tensor,  # one value (scalar) or its logit (beta), [T] values (token) or logits (logit), any stride
    stack: Tensor,  # S [D (+ padded R) + padded R, H + padded R]
    gram: Tensor,  # G [padded R, padded R] fp32 or bf16, any row stride
    *,
    rank: int,
    space: str,
    normalise: bool,
    gate_kind: str,
    eps: float,
    save: bool,
    out: Tensor,  # [z | 1 | 0 ...] as in the kernel: [T, 2 to 64 columns more than padded R], any row stride
    t: Tensor | None = None,  # P b, where it is there already, or O^T b; any row stride
) -> Saved:
    """Writes z. Returns what the gradients need; without `save` only some of it is there."""
    (tokens, hidden), padded = b.shape, gram.shape[0]
    half = b.dtype != torch.float32
    block_r, block_t = lanes(padded), 64 if half else 32
    given, own = b if t is None else t, None
    if space == "rank" and t is None:
        given = own = b @ stack[-2 * padded : -padded, :hidden].T
    saved = Saved.of(b, padded, space, normalise, save, own)
    # Two programs a multiprocessor: left alone, the compiler takes 138 registers, and there is room for one. Full OQC
    # and G in fp32 take more, and would spill.
    tight = block_r == 128 and space == "rank" and gram.dtype == torch.bfloat16
    _coefficients[(cdiv(tokens, block_t),)](
        b,
        u,
        v,
        gate,
        gram,
        out,
        given,
        *saved,
        tokens,
        eps,
        LEAST_KEEP[b.dtype],
        hidden,
        rank,
        padded,
        u.shape[1],
        b.stride(0),
        u.stride(0),
        v.stride(0),
        gate.stride(0) if gate.dim() else 0,
        given.stride(0),
        gram.stride(0),
        out.shape[1],
        out.stride(0),
        SPACE=SPACES[space],
        NORMALISE=normalise,
        GATE=GATES[gate_kind],
        SAVE=save,
        SAVE_T=save and space == "rank" and own is None,
        PRECISION="tf32" if half else "tf32x3",
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_K=256 if half else 64,
        num_warps=8 if half else 4,
        num_stages=1,  # by measurement
        **({"maxnreg": 128} if tight else {}),
    )
    return saved


def combination(
    host: Tensor, z: Tensor, stack: Tensor, bias: Tensor | None, keep: Tensor, residual: Tensor | None = None
) -> Tensor:
    """keep (W b + M z) + bias, with keep 1 where it is empty; rows of any stride. With a residual [T, D] its sum, in
    that one's dtype."""
    (tokens, width), padded = host.shape, z.shape[1]
    out = (host if residual is None else residual).new_empty(tokens, width)
    half = host.dtype != torch.float32
    block_r = lanes(padded)
    block_t, block_d, warps = (64, 256, 8) if half else (32, 32, 4)
    if half and residual is not None:  # by measurement
        block_d, warps = 64, 4
    _combination[(cdiv(tokens, block_t) * cdiv(width, block_d),)](
        host,
        z,
        stack,
        stack if bias is None else bias,
        keep if keep.numel() else host,
        host if residual is None else residual,
        out,
        tokens,
        stack.shape[1] - padded,
        padded,
        width,
        host.stride(0),
        z.stride(0),
        HAS_BIAS=bias is not None,
        KEEP=keep.numel() > 0,
        RESIDUAL=residual is not None,
        PRECISION="tf32" if half else "tf32x3",
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=warps,
    )
    return out


def rows(
    b: Tensor,  # to `gram`, and the keywords to `t`, as `coefficients` takes them
    u: Tensor,
    v: Tensor,
    gate: Tensor,
    stack: Tensor,
    gram: Tensor,
    bias: Tensor | None,
    residual: Tensor,  # [T, D] fp32, contiguous
    gamma: Tensor,  # of the norm [D] fp32, and beta
    beta: Tensor,
    norm_eps: float,
    *,
    rank: int,
    space: str,
    normalise: bool,
    gate_kind: str,
    eps: float,
    save: bool,
    out: Tensor,
    host: Tensor,  # [W b | P b], full: [W b | O^T b]; any row stride
) -> tuple[Saved, Tensor, Tensor, Tensor]:
    """What the gradients need; residual + output, its norm in b's dtype, and of that the mean and 1 / standard
    deviation [2, T]. In one kernel where its programs have room for all they keep, behind one that makes z where that
    is enough, else (and in fp32) in three."""
    (tokens, hidden), width, padded = b.shape, residual.shape[1], gram.shape[0]
    kind = {"rank": rank, "space": space, "normalise": normalise, "gate_kind": gate_kind, "eps": eps}
    t, room = host[:, width:], shared_memory(b.device) if b.dtype != torch.float32 else 0
    own = space != "hidden" and _room(width, gram, True) <= room and lanes(padded) <= MOST_OWN_LANES
    if own:
        saved = Saved.of(b, padded, space, normalise, save, None)
    else:
        saved = coefficients(b, u, v, gate, stack, gram, **kind, save=save, out=out, t=t)  # type: ignore[arg-type]
    if _room(width, gram, own) > room:
        y = combination(host[:, :width], out[:, :padded], stack, bias, saved.keep, residual)
        _, n, stats = triton_norm.forward(y, None, gamma, beta, norm_eps, b.dtype)
        return saved, y, n, stats
    y, n, stats = torch.empty_like(residual), b.new_empty(tokens, width), residual.new_empty(2, tokens)
    _rows[(min(cdiv(tokens, ROW_TOKENS), processors(b.device)),)](
        u,
        v,
        gate,
        gram,
        out,
        t,
        saved.t,
        saved.gp,
        saved.energy,
        saved.keep,
        host,
        stack,
        stack if bias is None else bias,
        residual,
        gamma,
        beta,
        y,
        n,
        stats,
        tokens,
        eps,
        norm_eps,
        hidden,
        rank,
        padded,
        width,
        u.shape[1],
        u.stride(0),
        v.stride(0),
        gate.stride(0) if gate.dim() else 0,
        host.stride(0),
        gram.stride(0),
        out.shape[1],
        out.stride(0),
        OWN_Z=own,
        SPACE=SPACES[space],
        NORMALISE=normalise,
        GATE=GATES[gate_kind],
        SAVE=save,
        HAS_BIAS=bias is not None,
        PRECISION="tf32",
        STAGES=ROW_STAGES,
        BLOCK_T=ROW_TOKENS,
        BLOCK_R=lanes(padded),
        BLOCK_D=lanes(width),
        num_warps=ROW_WARPS,
    )
    return saved, y, n, stats


def _room(width: int, gram: Tensor, own: bool) -> int:
    """Bytes of shared memory that a program of `_rows` may need, in half precision: M and G, rows of u, v and t or of z
    and of W b and the residual that are on their way, and one more tile of fp32."""
    block_r, block_d = lanes(gram.shape[0]), lanes(width)
    kept = 2 * block_r * block_d + (block_r * block_r * gram.element_size() if own else 0)
    moving = 2 * block_r * (3 if own else 1) + (2 + 4) * block_d
    return kept + ROW_TOKENS * ((ROW_STAGES - 1) * moving + 4 * block_d) + 1024  # a gate or 1 + kappa, too


def gradients(
    dy: Tensor,  # [T, D], contiguous; in half precision or, of a residual sum, in float32
    host: Tensor,  # [W b | O^T b] [T, D + padded R], any row stride; full only
    u: Tensor,
    v: Tensor,
    gate: Tensor,
    saved: Saved,
    stack: Tensor,
    *,
    rank: int,
    space: str,
    normalise: bool,
    gate_kind: str,
    eps: float,
    du: Tensor,
    dv: Tensor,
    dgate: Tensor | None,  # [T] (token), or the columns that begin with the logit: 16, or the last of dv
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Writes du, dv and a token's dgate. Returns [(1 + kappa) dy | dt | w], the gradient of |b|^2 (full only), and
    numbers that add up to that of the gate."""
    (tokens, width), padded = dy.shape, aligned(rank)
    if space == "hidden":
        saved = saved._replace(t=host[:, width:])
    hidden, half = stack.shape[1] - padded, stack.dtype != torch.float32
    block_r = lanes(padded)
    block_t, small_t = 64 if half else 32, gradient_tokens(rank)
    used = width + padded * (1 if space == "none" else 2)
    apart = half and width > SHORT_LOOP
    stacked = stack.new_empty(tokens, used + -used % 64)
    dpower = dy.new_empty(tokens, dtype=torch.float32) if space == "hidden" else None
    dkappa = torch.empty_like(saved.keep)
    parts = dy.new_empty(cdiv(tokens, small_t), dtype=torch.float32)
    scaled = dy.dtype != stack.dtype == torch.bfloat16  # fp16 could not hold dy times a small 1 + kappa
    if scaled:
        _rounded[(cdiv(tokens, ROUNDED_TOKENS),)](
            dy,
            host,
            saved.keep,
            stacked,
            dkappa,
            tokens,
            width,
            host.stride(0),
            stacked.stride(0),
            KEEP=space == "hidden",
            BLOCK_T=ROUNDED_TOKENS,
            BLOCK_D=256,
            num_warps=4,
        )
        torch.mm(stacked[:, :width], stack[:width, hidden:], out=stacked[:, used - padded : used])
    else:
        _gradient_of_z[(cdiv(tokens, block_t),)](
            dy,
            host,
            saved.keep,
            stack,
            stacked,
            dkappa,
            tokens,
            hidden,
            padded,
            width,
            used,
            host.stride(0),
            stacked.stride(0),
            KEEP=space == "hidden",
            APART=apart,
            PRECISION="tf32" if half else "tf32x3",
            BLOCK_T=block_t,
            BLOCK_R=block_r,
            BLOCK_D=(128 if space == "hidden" and not apart and dy.dtype == stack.dtype else 64) if half else 32,
            num_warps=4,
            num_stages=3 if apart else UNPIPELINED,
        )
    _gradients[(len(parts),)](
        stacked,
        dkappa,
        u,
        v,
        gate,
        *saved,
        du,
        dv,
        dkappa if dpower is None else dpower,
        dkappa if dgate is None else dgate,
        parts,
        tokens,
        eps,
        hidden,
        rank,
        padded,
        width,
        u.shape[1],
        u.stride(0),
        v.stride(0),
        saved.t.stride(0),
        du.stride(0),
        dv.stride(0),
        gate.stride(0) if gate.dim() else 0,
        0 if dgate is None else dgate.stride(0),
        used,
        stacked.stride(0),
        SPACE=SPACES[space],
        NORMALISE=normalise,
        GATE=GATES[gate_kind],
        SCALED=scaled,
        LAST=gate_kind == "logit" and dgate is not None and dgate.shape[1] == 1,
        BLOCK_T=small_t,
        BLOCK_R=block_r,
        num_warps=4,
    )
    return stacked, dpower, parts
