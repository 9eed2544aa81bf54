"""A residual sum and the LayerNorm of it in one kernel per direction.

    forward    s = x + y,   n = (s - mean) rstd gamma + beta                             of each row
    backward   h = (s - mean) rstd,   g = dn gamma
               dx = ds + rstd (g - mean(g) - h mean(g h)),   dy = dx in y's own dtype
               dgamma = sum of dn h,   dbeta = sum of dn                                 over all rows

Everything is float32 inside; the variance is the mean square of what is left after the mean. The backward is as many
programs as run at once: each walks over rows and sums dgamma and dbeta in registers, the next rows already on their way
while it works. No atomics: the programs' sums are added in a fixed order, so gradients are bit-reproducible.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.ops.device import processors
from oqc.ops.layout import cdiv, lanes
from oqc.ops.triton_sums import column_sums

WARPS = 4
PROGRAMS = 4  # of the backward that a multiprocessor's registers have room for


@triton.jit
def _tile(base, i, rows, D: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr):
    """Where rows i lie, `[rows, PIECES, COLUMNS]`, and which items of that exist.

    A warp has a row of up to 256, four neighbours a thread, whatever the dtype: left alone, the compiler takes eight
    where half precision is, and exchanges every float32 that is stored through shared memory.
    """
    j = tl.arange(0, PIECES)[None, :, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    at = base + (i.to(tl.int64)[:, None, None] * D + j)
    return tl.max_contiguous(at, [1, 1, 4]), (i < rows)[:, None, None] & (j < D)


@triton.jit
def _load(base, i, rows, D: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr):
    at, mask = _tile(base, i, rows, D, COLUMNS, PIECES)
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _mean(x, D: tl.constexpr):
    """Of each row."""
    return tl.sum(tl.sum(x, 1), 1) / D


@triton.jit
def _norm_forward(
    x, y, gamma, beta, s, n, stats, rows, eps,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, HAS_Y: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    one = tl.zeros([1], tl.int32)
    total = _load(x, i, rows, D, COLUMNS, PIECES)
    if HAS_Y:
        total += _load(y, i, rows, D, COLUMNS, PIECES).to(tl.float32)
    mean = _mean(total, D)
    at, mask = _tile(n, i, rows, D, COLUMNS, PIECES)
    left = tl.where(mask, total - mean[:, None, None], 0.0)
    rstd = tl.rsqrt(_mean(left * left, D) + eps)
    scale, shift = _load(gamma, one, 1, D, COLUMNS, PIECES), _load(beta, one, 1, D, COLUMNS, PIECES)
    tl.store(at, (left * rstd[:, None, None] * scale + shift).to(n.dtype.element_ty), mask=mask)
    if HAS_Y:
        at, mask = _tile(s, i, rows, D, COLUMNS, PIECES)
        tl.store(at, total, mask=mask)
    tl.store(stats + i, mean, mask=i < rows)
    tl.store(stats + rows + i, rstd, mask=i < rows)


@triton.jit
def _rows_of(
    s, ds, dn, stats, i, rows, D: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, HAS_DS: tl.constexpr
):
    """What the backward reads of some rows; a missing ds is dn again, and never used."""
    grad = _load(dn, i, rows, D, COLUMNS, PIECES)
    own = grad
    if HAS_DS:
        own = _load(ds, i, rows, D, COLUMNS, PIECES)
    total = _load(s, i, rows, D, COLUMNS, PIECES)
    mean = tl.load(stats + i, mask=i < rows, other=0.0)
    rstd = tl.load(stats + rows + i, mask=i < rows, other=0.0)
    return total, own, grad, mean[:, None, None], rstd[:, None, None]


@triton.jit
def _norm_backward(
    s, ds, dn, stats, gamma, dx, dy, partial, rows,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    HAS_DS: tl.constexpr, HAS_DY: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    one = tl.zeros([1], tl.int32)
    scale = _load(gamma, one, 1, D, COLUMNS, PIECES)
    dgamma = tl.zeros([ROWS, PIECES, COLUMNS], tl.float32)
    dbeta = tl.zeros([ROWS, PIECES, COLUMNS], tl.float32)
    total, own, grad, mean, rstd = _rows_of(s, ds, dn, stats, i, rows, D, COLUMNS, PIECES, HAS_DS)
    step = tl.num_programs(0) * ROWS
    for _ in range(tl.program_id(0) * ROWS, rows, step):
        later = _rows_of(s, ds, dn, stats, i + step, rows, D, COLUMNS, PIECES, HAS_DS)
        h, d = (total - mean) * rstd, grad.to(tl.float32)
        dgamma += d * h
        dbeta += d
        g = d * scale
        out = (g - _mean(g, D)[:, None, None] - h * _mean(g * h, D)[:, None, None]) * rstd
        if HAS_DS:
            out += own
        at, mask = _tile(dx, i, rows, D, COLUMNS, PIECES)
        tl.store(at, out, mask=mask)
        if HAS_DY:
            at, mask = _tile(dy, i, rows, D, COLUMNS, PIECES)
            tl.store(at, out.to(dy.dtype.element_ty), mask=mask)
        i += step
        total, own, grad, mean, rstd = later
    at, mask = _tile(partial + tl.program_id(0) * (2 * D), one, 1, D, COLUMNS, PIECES)
    tl.store(at, tl.sum(dgamma, 0)[None, :, :], mask=mask)
    tl.store(at + D, tl.sum(dbeta, 0)[None, :, :], mask=mask)


def _launch(width: int, rows: int = 1) -> dict[str, int]:
    """How many `rows` a warp has of up to 256; rows wider than WARPS warps take more warps, one row at a time."""
    block = lanes(width)
    pieces = 2 if block >= 256 else 1
    columns = block // pieces
    warps = max(WARPS, columns // 128)
    return {
        "D": width,
        "COLUMNS": columns,
        "PIECES": pieces,
        "ROWS": rows * warps * 128 // columns,
        "num_warps": warps,
    }


def forward(
    x: Tensor, y: Tensor | None, gamma: Tensor, beta: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor]:
    """s (None without y), n in `dtype`, and mean and rstd of each row as [2, rows]."""
    width = x.shape[-1]
    rows, launch = x.numel() // width, _launch(width, 2)
    s = None if y is None else torch.empty_like(x)
    n, stats = torch.empty_like(x, dtype=dtype), x.new_empty(2, rows)
    grid = (cdiv(rows, launch["ROWS"]),)
    given = (x, x if y is None else y, gamma, beta, x if s is None else s, n, stats, rows, eps)
    _norm_forward[grid](*given, HAS_Y=y is not None, **launch)
    return s, n, stats


def backward(
    ds: Tensor | None, dn: Tensor, s: Tensor, stats: Tensor, gamma: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """dx, the same in `dtype` where one is given, and [2, D]: dgamma and dbeta."""
    width = s.shape[-1]
    rows, launch = s.numel() // width, _launch(width)
    dx = torch.empty_like(s)
    dy = None if dtype is None else torch.empty_like(s, dtype=dtype)
    room = max(1, processors(s.device) * PROGRAMS * WARPS // launch["num_warps"])
    programs = min(room, cdiv(rows, launch["ROWS"]))
    partial = s.new_empty(programs, 2 * width)
    given = (s, dn if ds is None else ds, dn, stats, gamma, dx, dx if dy is None else dy, partial, rows)
    _norm_backward[(programs,)](*given, HAS_DS=ds is not None, HAS_DY=dy is not None, **launch)
    return dx, dy, column_sums(partial).view(2, width)
