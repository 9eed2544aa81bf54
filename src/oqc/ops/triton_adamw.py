"""AdamW over many tensors, and the sum of their gradients' squares, each in one launch.

    g = grad / divisor,   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
    p = p (1 - lr decay) - lr / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)

PyTorch's fused kernel takes 36 tensors a launch and 65,536 items a block, so that a model of this size fills a third of
the GPU. Here a program takes CHUNK items of one tensor, whose addresses it reads from a table. All tensors are float32
and contiguous.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.ops.layout import lanes

CHUNK = 1024


@triton.jit
def _pointer(addresses, role: tl.constexpr, tensor, count: tl.constexpr):
    return tl.load(addresses + role * count + tensor).to(tl.pointer_type(tl.float32))


@triton.jit
def _items(pieces, CHUNK: tl.constexpr):
    """Which tensor this program is for, which of its items, and which of those exist."""
    piece = pieces + 3 * tl.program_id(0)
    i = tl.arange(0, CHUNK)
    return tl.load(piece), tl.load(piece + 1) + i, i < tl.load(piece + 2)


@triton.jit
def _adamw_squares(addresses, pieces, partial, count: tl.constexpr, CHUNK: tl.constexpr):
    tensor, i, live = _items(pieces, CHUNK)
    g = tl.load(_pointer(addresses, 0, tensor, count) + i, mask=live, other=0.0)
    tl.store(partial + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _adamw_update(
    addresses, pieces, lr, divisor, found_inf, decay, eps, beta1, rest1, beta2, rest2,
    LOG1: tl.constexpr, LOG2: tl.constexpr, DIVIDE: tl.constexpr, CHECK: tl.constexpr,
    count: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    wrong = 0.0
    if CHECK:
        wrong = tl.load(found_inf)
    if wrong == 0.0:
        tensor, i, live = _items(pieces, CHUNK)
        p_at, m_at = _pointer(addresses, 1, tensor, count) + i, _pointer(addresses, 2, tensor, count) + i
        v_at = _pointer(addresses, 3, tensor, count) + i
        g = tl.load(_pointer(addresses, 0, tensor, count) + i, mask=live, other=0.0)
        p, m = tl.load(p_at, mask=live, other=0.0), tl.load(m_at, mask=live, other=0.0)
        v = tl.load(v_at, mask=live, other=0.0)
        t = (tl.load(_pointer(addresses, 4, tensor, count)) + 1).to(tl.float64)
        # 1 - beta^t in double precision: in the first steps it is a small difference
        correction1 = (1.0 - tl.exp(t * tl.full([], LOG1, tl.float64))).to(tl.float32)
        correction2 = (1.0 - tl.exp(t * tl.full([], LOG2, tl.float64))).to(tl.float32)
        rate = tl.load(lr)
        if DIVIDE:
            g = g / tl.load(divisor)
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        p -= rate * decay * p
        p -= rate / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
        tl.store(p_at, p, mask=live)
        tl.store(m_at, m, mask=live)
        tl.store(v_at, v, mask=live)


@triton.jit
def _adamw_count(addresses, found_inf, CHECK: tl.constexpr, count: tl.constexpr, LANES: tl.constexpr):
    i = tl.arange(0, LANES)
    at = tl.load(addresses + 4 * count + i, mask=i < count, other=0).to(tl.pointer_type(tl.float32))
    t = tl.load(at, mask=i < count, other=0.0)
    if CHECK:
        t = tl.where(tl.load(found_inf) == 0.0, t, t - 1)
    tl.store(at, t + 1, mask=i < count)


def pieces(sizes: Sequence[int], first: int = 0) -> list[tuple[int, int, int]]:
    """What each program works on: a tensor by its number in the table, the first item and how many."""
    return [
        (number, start, min(CHUNK, size - start))
        for number, size in enumerate(sizes, first)
        for start in range(0, size, CHUNK)
    ]


def squares(addresses: Tensor, pieces: Tensor) -> Tensor:
    """Numbers that add up to the sum of the gradients' squares."""
    partial = torch.empty(len(pieces), dtype=torch.float32, device=pieces.device)
    if len(pieces):
        _adamw_squares[(len(pieces),)](addresses, pieces, partial, addresses.shape[1], CHUNK)
    return partial


def update(
    addresses: Tensor,  # [5, tensors] int64: of gradients, parameters, m, v and t
    pieces: Tensor,  # [programs, 3] int64
    *,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    divisor: Tensor | None,  # of every gradient
    found_inf: Tensor | None,  # unless it is 0 nothing changes
) -> None:
    """One step of the tensors that the pieces name; t stays as it is."""
    if len(pieces):
        scalars = (lr, lr if divisor is None else divisor, lr if found_inf is None else found_inf)
        numbers = (decay, eps, betas[0], 1 - betas[0], betas[1], 1 - betas[1])
        logs = (math.log(max(beta, 1e-300)) for beta in betas)
        given = (divisor is not None, found_inf is not None, addresses.shape[1], CHUNK)
        _adamw_update[(len(pieces),)](addresses, pieces, *scalars, *numbers, *logs, *given)


def count_step(addresses: Tensor, found_inf: Tensor | None) -> None:
    """Adds one to t of every tensor."""
    count = addresses.shape[1]
    _adamw_count[(1,)](
        addresses, addresses if found_inf is None else found_inf, found_inf is not None, count, lanes(count)
    )
