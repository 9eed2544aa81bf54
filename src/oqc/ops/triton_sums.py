"""Sums over rows, in a fixed order: how the partial results of programs become gradients.

PyTorch's own column sum reads tall, narrow matrices at a tenth of the memory's speed. Here many programs sum a run of
rows each, and a second launch adds what they found.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.ops.layout import cdiv

LONG, SHORT = (32, 128), (128, 32)  # rows and columns a program takes at once
MOST_RUNS = 128
FEW_ROWS = 1024  # one launch is enough for these


@triton.jit
def _column_sums(x, out, rows, columns, x_row, run, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """out[program 1] = sum of x over that program's run of rows."""
    j = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    first = tl.program_id(1) * run
    acc = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, run, BLOCK_ROWS):
        i = start + tl.arange(0, BLOCK_ROWS)
        mask = ((i < run) & (first + i < rows))[:, None] & (j < columns)[None, :]
        at = x + (first + i).to(tl.int64)[:, None] * x_row + j[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(1) * columns + j, tl.sum(acc, 0), mask=j < columns)


def column_sums(x: Tensor) -> Tensor:
    """x [rows, columns], any row stride, summed over its rows in float32."""
    rows, columns = x.shape
    block_rows, block_columns = SHORT if rows <= FEW_ROWS else LONG
    runs = 1 if rows <= FEW_ROWS else min(MOST_RUNS, cdiv(rows, 2 * block_rows))
    out = torch.empty(runs, columns, device=x.device, dtype=torch.float32)
    run = cdiv(rows, runs)
    grid = (cdiv(columns, block_columns), runs)
    _column_sums[grid](x, out, rows, columns, x.stride(0), run, block_rows, block_columns)
    return out[0] if runs == 1 else column_sums(out)
