"""What stands between a host's linear maps and b where every number is by itself: b = act(a), or act(a) * c.

Backward, from the maps alone: da = db * c * act'(a), dc = db * act(a), and their sums over tokens, which are the
gradients of the maps' biases. A program takes a block of channels and a run of tokens and leaves one fp32 partial of
its sums; these are added in a fixed order. fp32 inside.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: SIM109 -- the kernels are written in Triton's subset of the language
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.ops.layout import cdiv
from oqc.ops.triton_sums import column_sums

GELU, GELU_TANH, QUICK_GELU, RELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SILU, SIGMOID, IDENTITY = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "quick_gelu": 2, "relu": 3, "silu": 4, "sigmoid": 5, "identity": 6}
BLOCK_T, BLOCK_H = 16, 128
RUN = 256  # tokens of a backward program, or more where there are very many
MOST_RUNS = 128


@triton.jit
def _act(x, ACT: tl.constexpr):
    """act(x) and act'(x)."""
    if ACT == GELU:
        share = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        value, slope = x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == GELU_TANH:
        inner = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)  # twice what the hyperbolic tangent is taken of
        share = 1.0 / (1.0 + tl.exp(-inner))
        outer = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        value, slope = x * share, share + x * share * (1.0 - share) * outer
    elif ACT == QUICK_GELU or ACT == SILU:
        steep = 1.702 if ACT == QUICK_GELU else 1.0
        share = 1.0 / (1.0 + tl.exp(-steep * x))
        value, slope = x * share, share + steep * x * share * (1.0 - share)
    elif ACT == RELU:
        value, slope = tl.where(x <= 0.0, 0.0, x), tl.where(x > 0.0, 1.0, 0.0)  # what is not a number stays so
    elif ACT == SIGMOID:
        value = 1.0 / (1.0 + tl.exp(-x))
        slope = value * (1.0 - value)
    else:
        value, slope = x, tl.full(x.shape, 1.0, tl.float32)
    return value, slope


@triton.jit(do_not_specialize=["tokens"])
def _mix_forward(
    a,  # [T, H], row stride a_row
    c,  # likewise, where GATED
    b,
    tokens,
    hidden: tl.constexpr,
    a_row: tl.constexpr,
    c_row: tl.constexpr,
    b_row: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_T
    i = tl.arange(0, BLOCK_T)[:, None]
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    mask = (i < tokens - first) & (h < hidden)
    value, _slope = _act(tl.load(a + first * a_row + i * a_row + h, mask=mask, other=0.0).to(tl.float32), ACT)
    if GATED:
        value *= tl.load(c + first * c_row + i * c_row + h, mask=mask, other=0.0).to(tl.float32)
    tl.store(b + first * b_row + i * b_row + h, value.to(b.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "run"])
def _mix_backward(
    db,  # [T, H]
    dpower,  # [T] fp32, the gradient of |b|^2, where POWER
    a,
    c,
    da,
    dc,
    sums,  # [runs, H], or [runs, 2 H] where GATED: of da and dc
    tokens,
    run,
    hidden: tl.constexpr,
    db_row: tl.constexpr,
    a_row: tl.constexpr,
    c_row: tl.constexpr,
    da_row: tl.constexpr,
    dc_row: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    first = tl.program_id(1).to(tl.int64) * run
    sum_a = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    sum_c = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for start in range(0, run, BLOCK_T):
        i = start + tl.arange(0, BLOCK_T)
        live = (i < run) & (i < tokens - first)
        mask = live[:, None] & (h < hidden)[None, :]
        row, column = first + i[:, None], h[None, :]
        value, slope = _act(tl.load(a + row * a_row + column, mask=mask, other=0.0).to(tl.float32), ACT)
        grad = tl.load(db + row * db_row + column, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            right = tl.load(c + row * c_row + column, mask=mask, other=0.0).to(tl.float32)
            slope *= right
        if POWER:  # 2 b of it belongs to b
            b = value
            if GATED:
                b *= right
            grad += 2.0 * tl.load(dpower + first + i, mask=live, other=0.0)[:, None] * b
        tl.store(da + row * da_row + column, (grad * slope).to(da.dtype.element_ty), mask=mask)
        sum_a += grad * slope
        if GATED:
            tl.store(dc + row * dc_row + column, (grad * value).to(dc.dtype.element_ty), mask=mask)
            sum_c += grad * value
    columns: tl.constexpr = 2 * hidden if GATED else hidden
    tl.store(sums + tl.program_id(1) * columns + h, tl.sum(sum_a, 0), mask=h < hidden)
    if GATED:
        tl.store(sums + tl.program_id(1) * columns + hidden + h, tl.sum(sum_c, 0), mask=h < hidden)


def forward(a: Tensor, c: Tensor | None, act: str, *, out: Tensor) -> None:
    """Writes b [T, H]; all with any row stride. Without c: b = act(a)."""
    tokens, hidden = a.shape
    right = a if c is None else c
    _mix_forward[(cdiv(tokens, BLOCK_T), cdiv(hidden, BLOCK_H))](
        a,
        right,
        out,
        tokens,
        hidden,
        a.stride(0),
        right.stride(0),
        out.stride(0),
        ACT=ACTIVATIONS[act],
        GATED=c is not None,
        BLOCK_T=BLOCK_T,
        BLOCK_H=BLOCK_H,
        num_warps=4,
    )


def backward(
    db: Tensor, dpower: Tensor | None, a: Tensor, c: Tensor | None, act: str, *, da: Tensor, dc: Tensor | None
) -> Tensor:
    """Writes da and dc; returns their sums over tokens, [H] or [2 H], in fp32."""
    tokens, hidden = a.shape
    runs = max(1, min(MOST_RUNS, cdiv(tokens, RUN)))
    right, dright = (a, da) if c is None or dc is None else (c, dc)
    sums = db.new_empty(runs, hidden if c is None else 2 * hidden, dtype=torch.float32)
    _mix_backward[(cdiv(hidden, BLOCK_H), runs)](
        db,
        db if dpower is None else dpower,
        a,
        right,
        da,
        dright,
        sums,
        tokens,
        cdiv(tokens, runs),
        hidden,
        db.stride(0),
        a.stride(0),
        right.stride(0),
        da.stride(0),
        dright.stride(0),
        ACT=ACTIVATIONS[act],
        GATED=c is not None,
        POWER=dpower is not None,
        BLOCK_T=BLOCK_T,
        BLOCK_H=BLOCK_H,
        num_warps=4,
    )
    return column_sums(sums)
