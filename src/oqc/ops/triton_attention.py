"""Attention over short sequences, straight on the packed projection qkv [B, N, 3, heads, d].

One program has one head of one image whole: S = scale Q K^T, P = softmax(S), O = P V, with S and P in registers and
never in memory. The backward recomputes P and writes dQ, dK, dV into their places in the packed gradient:

    dV = P^T dO,   dP = dO V^T,   dS = P * (dP - rowsum(dP * P)),   dQ = scale dS K,   dK = scale dS^T Q.

Products in the inputs' half precision with float32 sums, softmax in float32. Nothing is reduced across programs.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.ops.layout import lanes

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def _dot(a, b):
    """a b in float32; the interpreter would multiply bf16 as bit patterns."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def _probabilities(q, k, n, scale, tokens):
    """softmax(scale Q K^T) in float32, 0 in the columns past the last token."""
    s = _dot(q, tl.trans(k)) * scale
    s = tl.where((n < tokens)[None, :], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def _attention_forward(qkv, out, scale, tokens, heads: tl.constexpr, BLOCK_N: tl.constexpr, d: tl.constexpr):
    image, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    n, j = tl.arange(0, BLOCK_N), tl.arange(0, d)
    width: tl.constexpr = heads * d
    mask = (n < tokens)[:, None]
    base = qkv + image.to(tl.int64) * tokens * 3 * width + head * d + n[:, None] * (3 * width) + j[None, :]
    q = tl.load(base, mask=mask, other=0.0)
    k = tl.load(base + width, mask=mask, other=0.0)
    v = tl.load(base + 2 * width, mask=mask, other=0.0)
    p = _probabilities(q, k, n, scale, tokens)
    o = _dot(p.to(v.dtype), v)
    place = out + image.to(tl.int64) * tokens * width + head * d + n[:, None] * width + j[None, :]
    tl.store(place, o.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attention_backward(qkv, dout, dqkv, scale, tokens, heads: tl.constexpr, BLOCK_N: tl.constexpr, d: tl.constexpr):
    image, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    n, j = tl.arange(0, BLOCK_N), tl.arange(0, d)
    width: tl.constexpr = heads * d
    mask = (n < tokens)[:, None]
    start = image.to(tl.int64) * tokens * 3 * width + head * d
    place = n[:, None] * (3 * width) + j[None, :]
    q = tl.load(qkv + start + place, mask=mask, other=0.0)
    k = tl.load(qkv + start + width + place, mask=mask, other=0.0)
    v = tl.load(qkv + start + 2 * width + place, mask=mask, other=0.0)
    rows = dout + image.to(tl.int64) * tokens * width + head * d + n[:, None] * width + j[None, :]
    do = tl.load(rows, mask=mask, other=0.0)
    p = _probabilities(q, k, n, scale, tokens)
    dv = _dot(tl.trans(p.to(do.dtype)), do)
    dp = _dot(do, tl.trans(v))
    ds = (p * (dp - tl.sum(dp * p, 1)[:, None]) * scale).to(q.dtype)
    dq = _dot(ds, k)
    dk = _dot(tl.trans(ds), q)
    tl.store(dqkv + start + place, dq.to(dqkv.dtype.element_ty), mask=mask)
    tl.store(dqkv + start + width + place, dk.to(dqkv.dtype.element_ty), mask=mask)
    tl.store(dqkv + start + 2 * width + place, dv.to(dqkv.dtype.element_ty), mask=mask)


def _launch(tokens: int) -> dict[str, int]:
    block = lanes(tokens)
    return {"BLOCK_N": block, "num_warps": 2 if block <= 32 else 4 if block <= 64 else 8, "num_stages": 1}


def forward(qkv: Tensor, heads: int) -> Tensor:
    """[B, N, 3 D] to [B, N, D]."""
    batch, tokens, packed = qkv.shape
    width = packed // 3
    out = qkv.new_empty(batch, tokens, width)
    size = width // heads
    _attention_forward[(batch * heads,)](qkv, out, size**-0.5, tokens, heads=heads, d=size, **_launch(tokens))
    return out


def backward(dout: Tensor, qkv: Tensor, heads: int) -> Tensor:
    batch, tokens, packed = qkv.shape
    dqkv = torch.empty_like(qkv)
    size = packed // 3 // heads
    grid = (batch * heads,)
    _attention_backward[grid](qkv, dout, dqkv, size**-0.5, tokens, heads=heads, d=size, **_launch(tokens))
    return dqkv
