"""The products of weights that the rank-space identity needs, in one kernel per direction.

Forward, from W [D, H], O [H, R] and P [R, H], with the rank padded by zeros:

    S = [W M; P 0; 0 G] (full OQC: O^T for P; without orthogonalisation no such rows),   M = W O,   G = O^T O

Backward: dW = dS_W + dM O^T,   dO = W^T dM + O (dG + dG^T) (full: + dS_O^T),   dP = dS_P. Both are tiny and would cost
a dozen launches as separate PyTorch operations; they take any number of layers at once, along the first axis. S leaves
in fp32, which carries the gradient, and in the compute dtype. Products are fp32-accurate, or tf32 where that is a half
one.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.ops.device import shared_memory
from oqc.ops.layout import aligned, cdiv, lanes

BLOCK = 16  # rows of S a forward program has, and columns of W a backward program has
BLOCK_K = 64  # of what a product is summed over, at a time
STAGES = 4  # of the forward's loops
BLOCK_C = 256  # columns of S that a forward program copies


@triton.jit
def _load(base, i, j, i_stride, j_stride, rows, columns):
    """base[i, j] as fp32, 0 outside rows x columns."""
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(base + i[:, None] * i_stride + j[None, :] * j_stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _put(base, i, j, row, rows, columns, value):
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(base + i[:, None] * row + j[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _store(exact, stack, i, j, row, rows, columns, value):
    _put(exact, i, j, row, rows, columns, value)
    _put(stack, i, j, row, rows, columns, value)


@triton.jit
def _fold_forward(
    weight,  # W [layers, D, H]
    lift,  # O [layers, H, R]
    project,  # P [layers, R, H], where TAIL is 1
    exact,  # S [layers, D (+ padded) + padded, H + padded] fp32
    stack,  # the same in the compute dtype
    hidden: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    TAIL: tl.constexpr,  # what follows W in S: 0 O^T, 1 P, 2 nothing
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program has a block of M's rows, of G's, or of those of [W; P; 0], which are copied."""
    ROW: tl.constexpr = hidden + padded
    LAST: tl.constexpr = width + (0 if TAIL == 2 else padded)  # where G's rows begin
    layer = tl.program_id(1)
    weight += layer * width * hidden
    lift += layer * hidden * rank
    project += layer * hidden * rank
    exact += layer * (LAST + padded) * ROW
    stack += layer * (LAST + padded) * ROW
    for_m = tl.cdiv(width, BLOCK)
    for_g = tl.cdiv(padded, BLOCK)
    pid = tl.program_id(0)
    r = tl.arange(0, BLOCK_R)
    acc = tl.zeros([BLOCK, BLOCK_R], tl.float32)
    if pid < for_m:
        i = pid * BLOCK + tl.arange(0, BLOCK)
        for start in range(0, hidden, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            w = _load(weight, i, k, hidden, 1, width, hidden)
            acc = tl.dot(w, _load(lift, k, r, rank, 1, hidden, rank), acc, input_precision=PRECISION)
        _store(exact + hidden, stack + hidden, i, r, ROW, width, padded, acc)
    elif pid < for_m + for_g:
        i = (pid - for_m) * BLOCK + tl.arange(0, BLOCK)
        for start in range(0, hidden, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            o = _load(lift, i, k, 1, rank, rank, hidden)  # rows of O^T
            acc = tl.dot(o, _load(lift, k, r, rank, 1, hidden, rank), acc, input_precision=PRECISION)
        corner = LAST * ROW + hidden
        _store(exact + corner, stack + corner, i, r, ROW, padded, padded, acc)
        if TAIL != 2:
            corner = width * ROW + hidden
            _store(exact + corner, stack + corner, i, r, ROW, padded, padded, tl.zeros_like(acc))
    else:
        chunks = tl.cdiv(hidden, BLOCK_C)
        i = (pid - for_m - for_g) // chunks * BLOCK + tl.arange(0, BLOCK)
        k = (pid - for_m - for_g) % chunks * BLOCK_C + tl.arange(0, BLOCK_C)
        value = _load(weight, i, k, hidden, 1, width, hidden)
        below = tl.where(i < width, rank, i - width)  # rows of P, none for those of W
        if TAIL == 0:
            value += _load(lift, below, k, 1, rank, rank, hidden)
        if TAIL == 1:
            value += _load(project, below, k, hidden, 1, rank, hidden)
        _store(exact, stack, i, k, ROW, LAST + padded, hidden, value)


@triton.jit
def _fold_backward(
    dstack,
    weight,
    lift,
    dweight,  # [layers, D, H]
    dlift,  # [layers, H, R]
    dproject,  # [layers, R, H], where TAIL is 1
    hidden: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ROW: tl.constexpr = hidden + padded
    layer = tl.program_id(1)
    dstack += layer * (width + (1 if TAIL == 2 else 2) * padded) * ROW
    dgram = dstack + (width + (0 if TAIL == 2 else padded)) * ROW + hidden
    weight += layer * width * hidden
    lift += layer * hidden * rank
    dweight += layer * width * hidden
    dlift += layer * hidden * rank
    dproject += layer * hidden * rank
    h = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    r = tl.arange(0, BLOCK_R)
    o = _load(lift, h, r, rank, 1, hidden, rank)
    both = _load(dgram, r, r, ROW, 1, padded, padded) + _load(dgram, r, r, 1, ROW, padded, padded)
    acc = tl.dot(o, both, input_precision=PRECISION)
    for start in range(0, width, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        dm = _load(dstack + hidden, d, r, ROW, 1, width, padded)
        w = _load(weight, h, d, 1, hidden, hidden, width)  # W^T
        acc = tl.dot(w, dm, acc, input_precision=PRECISION)
        dw = _load(dstack, d, h, ROW, 1, width, hidden)
        dw = tl.dot(dm, tl.trans(o), dw, input_precision=PRECISION)
        _put(dweight, d, h, hidden, width, hidden, dw)
    if TAIL == 0:
        acc += _load(dstack + width * ROW, h, r, 1, ROW, hidden, padded)
    if TAIL == 1:
        _put(dproject, r, h, hidden, rank, hidden, _load(dstack + width * ROW, r, h, ROW, 1, padded, hidden))
    _put(dlift, h, r, rank, hidden, rank, acc)


def forward(
    weight: Tensor, lift: Tensor, project: Tensor | None, *, space: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """S in fp32 and in `dtype`."""
    (layers, width, hidden), rank = weight.shape, lift.shape[2]
    padded = aligned(rank)
    rows = width + (1 if space == "none" else 2) * padded
    exact, stack = (weight.new_empty(layers, rows, hidden + padded, dtype=kind) for kind in (torch.float32, dtype))
    copied = cdiv(rows, BLOCK) * cdiv(hidden, BLOCK_C)
    constants = _constants(weight, lift, padded, space, dtype)
    ahead = 4 * BLOCK_K * (BLOCK + constants["BLOCK_R"])  # bytes that are loaded while others are multiplied
    fits = (STAGES - 1) * ahead <= shared_memory(weight.device)
    _fold_forward[(cdiv(width, BLOCK) + cdiv(padded, BLOCK) + copied, layers)](
        weight,
        lift,
        lift if project is None else project,
        exact,
        stack,
        **constants,
        BLOCK_C=BLOCK_C,
        num_stages=STAGES if fits else STAGES - 1,
    )
    return exact, stack


def backward(
    dstack: Tensor, weight: Tensor, lift: Tensor, project: Tensor | None, *, space: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dW, dO and dP (empty where there is no P)."""
    dweight, dlift = torch.empty_like(weight), torch.empty_like(lift)
    dproject = weight.new_empty(0) if project is None else torch.empty_like(project)
    _fold_backward[(cdiv(weight.shape[2], BLOCK), weight.shape[0])](
        dstack,
        weight,
        lift,
        dweight,
        dlift,
        dproject,
        **_constants(weight, lift, dstack.shape[2] - weight.shape[2], space, dtype),
        num_stages=1,  # dm is an operand of two products: see triton_complement.UNPIPELINED
    )
    return dweight, dlift, dproject


def _constants(weight: Tensor, lift: Tensor, padded: int, space: str, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden": weight.shape[2],
        "rank": lift.shape[2],
        "padded": padded,
        "width": weight.shape[1],
        "TAIL": {"hidden": 0, "rank": 1, "none": 2}[space],
        "BLOCK": BLOCK,
        "BLOCK_K": BLOCK_K,
        "BLOCK_R": lanes(padded),
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
        "num_warps": 4 if padded <= 64 else 8,
    }
