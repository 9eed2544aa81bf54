"""Asks whether what follows the products is better one kernel than two or three: z, M z + residual, and the next norm.

    python benchmarks/one_kernel.py [--minutes 2] [--out results/bench/one-kernel-nvidia-h200.json]

In use are a kernel for z (`_coefficients`), one that adds M z and the residual (`_combination`) and one for the norm of
the sum (`_norm_forward`). Here one kernel does the first two, or all three: a program holds z of its tokens and walks
over the columns of the output, or holds all of them where it also takes the norm. Every form is held against the ones
in use before it is timed; the inputs of a launch are never in the cache. Writes the times of all blocks of tokens and
columns that were tried. Without a GPU, under TRITON_INTERPRET=1, it only compares.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.files import write_whole
from oqc.ops import triton_complement, triton_norm
from oqc.ops.device import on_kernels
from oqc.ops.layout import aligned, cdiv, lanes
from oqc.ops.triton_complement import GATES, HIDDEN, LEAST_KEEP, RANK, SPACES, _along, _dot, _full, _load_gate
from oqc.ops.triton_complement import _load_rows as _rows
from oqc.train.environment import environment

WIDTH, TABLES = 256, {"lowrank": ("rank", 56, "beta"), "full": ("hidden", 64, "beta"), "dynamic": ("rank", 83, "logit")}
SETS = 6  # of inputs that take turns: together several times the cache
EPS = 1e-6


@triton.jit(do_not_specialize=["tokens"])
def _output(
    b,
    u,
    v,
    gate,
    gram,
    given,  # [T, padded R]
    host,  # W b [T, D]
    residual,  # [T, D] fp32
    stack,
    bias,
    gamma,
    beta,
    z,  # [T, z_columns], where SAVE
    gp,
    energy,
    power,
    keep,
    y,  # residual + y [T, D] fp32
    n,  # the norm of that [T, D]
    stats,  # its mean and 1 / standard deviation [2, T]
    tokens,
    eps,
    least,
    norm_eps,
    hidden: tl.constexpr,
    rank: tl.constexpr,
    padded: tl.constexpr,
    width: tl.constexpr,
    b_row: tl.constexpr,
    u_row: tl.constexpr,
    gate_row: tl.constexpr,
    given_row: tl.constexpr,
    gram_row: tl.constexpr,
    host_row: tl.constexpr,
    z_columns: tl.constexpr,
    z_row: tl.constexpr,
    SPACE: tl.constexpr,
    GATE: tl.constexpr,
    SAVE: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # as in `_coefficients`
    first = block.to(tl.int64) * BLOCK_T
    row = tl.arange(0, BLOCK_T)
    live = row < tokens - first
    r = tl.arange(0, BLOCK_R)
    wide = live[:, None] & (r < padded)[None, :]
    g = tl.trans(_rows(gram, r, r < padded, gram_row, r, padded))
    main = _rows(given + first * given_row, row, live, given_row, r, padded).to(tl.float32)
    u_r = _rows(u + first * u_row, row, live, u_row, r, padded).to(tl.float32)
    v_r = _rows(v + first * u_row, row, live, u_row, r, padded).to(tl.float32)
    if SPACE == HIDDEN:
        size = tl.zeros([BLOCK_T], tl.float32)
        for start in range(0, hidden, BLOCK_K):
            b_k = _rows(b + first * b_row, row, live, b_row, start + tl.arange(0, BLOCK_K), hidden).to(tl.float32)
            size += tl.sum(b_k * b_k, 1)
    if GATE == 2:  # its logit lies in a column of v
        v_r = tl.where((r < rank)[None, :], v_r, 0.0)
    s = u_r * v_r
    scale = _load_gate(gate, first, row, live, gate_row, GATE)
    one = tl.full([BLOCK_T], 1.0, tl.float32)
    ss = tl.sum(s * s, 1)
    if SPACE == RANK:
        a, c, _main, share = _along(ss, tl.sum(s * main, 1), tl.sum(main * main, 1), rank, eps)
        q = a[:, None] * s - (share * c)[:, None] * main
        q = tl.rsqrt(tl.sum(q * q, 1) / rank + eps)[:, None] * q
    else:
        q = tl.rsqrt(ss / rank + eps)[:, None] * s
    gq = _dot(q.to(g.dtype), g, tl.zeros([BLOCK_T, BLOCK_R], tl.float32), PRECISION)
    e = tl.maximum(tl.sum(gq * q, 1), 0.0)
    if SAVE:
        tl.store(gp + first * padded + row[:, None] * padded + r[None, :], gq.to(gp.dtype.element_ty), mask=wide)
        tl.store(energy + first + row, e, mask=live)
    if SPACE == HIDDEN:
        qt = tl.sum(q * main, 1)
        scale_a, scale_b, _qt, _inner, _main, c, _rest, scale_r = _full(qt, size, e, hidden, eps)
        kept = 1.0 - scale * c * scale_b * scale_r
        kept = tl.where(kept < 0.0, tl.minimum(kept, -least), tl.maximum(kept, least))
        one = 1.0 / kept
        if SAVE:
            tl.store(keep + first + row, kept, mask=live)
            tl.store(power + first + row, size, mask=live)
        scale = scale * scale_a * scale_r * one
    else:
        scale = scale * tl.rsqrt(e / hidden + eps)
    z_r = (scale[:, None] * q).to(u.dtype.element_ty)
    if SAVE:
        out = z + first * z_row + row[:, None] * z_row
        tl.store(out + r[None, :], z_r, mask=wide)
        SPARE: tl.constexpr = 32 if z_columns <= padded + 32 else 64
        rest = padded + tl.arange(0, SPARE)[None, :] + tl.zeros_like(row)[:, None]
        of_one = one.to(z.dtype.element_ty).to(tl.float32)
        ones = tl.where(rest == padded + 1, (one - of_one)[:, None], 0.0)
        ones = tl.where(rest == padded, of_one[:, None], ones).to(z.dtype.element_ty)
        tl.store(out + rest, ones, mask=live[:, None] & (rest < z_columns))
    for start in range(0, width, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        some = live[:, None] & (d < width)[None, :]
        m_d = _rows(stack + hidden, d, d < width, hidden + padded, r, padded)
        value = _dot(z_r, tl.trans(m_d), tl.zeros([BLOCK_T, BLOCK_D], tl.float32), PRECISION)
        value += _rows(host + first * host_row, row, live, host_row, d, width).to(tl.float32)
        if SPACE == HIDDEN:
            value = kept[:, None] * value
        value += tl.load(bias + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
        value += _rows(residual + first * width, row, live, width, d, width).to(tl.float32)
        at = first * width + row[:, None] * width + d[None, :]
        tl.store(y + at, value, mask=some)
        if NORM:  # of whole rows: BLOCK_D is at least the width
            mean = tl.sum(value, 1) / width  # what is masked is 0
            left = tl.where(some, value - mean[:, None], 0.0)
            rstd = tl.rsqrt(tl.sum(left * left, 1) / width + norm_eps)
            weight = tl.load(gamma + d, mask=d < width, other=0.0)
            shift = tl.load(beta + d, mask=d < width, other=0.0)
            normed = left * rstd[:, None] * weight[None, :] + shift[None, :]
            tl.store(n + at, normed.to(n.dtype.element_ty), mask=some)
            if SAVE:
                tl.store(stats + first + row, mean, mask=live)
                tl.store(stats + tokens + first + row, rstd, mask=live)


class Inputs(NamedTuple):
    b: Tensor  # [T, H], beside z
    u: Tensor
    v: Tensor
    gate: Tensor
    gram: Tensor
    host: Tensor  # [W b | t]
    residual: Tensor
    stack: Tensor
    bias: Tensor
    gamma: Tensor
    beta: Tensor
    z: Tensor

    @property
    def padded(self) -> int:
        return self.gram.shape[0]


def make(kind: str, tokens: int, hidden: int, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """What stands before the kernels, laid out as the operator does."""
    space, rank, gate_kind = TABLES[kind]
    padded, generator = aligned(rank), torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, device=device)

    spare = padded > rank
    proj = normal(tokens, 2 * padded)
    proj[:, rank:padded] = 0
    proj[:, padded + rank :] = 0
    if gate_kind == "logit":
        assert spare
        proj[:, -1] = normal(tokens)
    proj = proj.to(dtype)
    columns = hidden + padded + 2
    both = normal(tokens, columns + -columns % 32).to(dtype)
    lift = torch.nn.functional.pad(normal(hidden, rank, scale=rank**-0.5), (0, padded - rank))
    weight = normal(WIDTH, hidden, scale=hidden**-0.5)
    top = torch.cat([weight, weight @ lift], 1)
    bottom = torch.nn.functional.pad(lift.T @ lift, (hidden, 0))
    stack = torch.cat([top, bottom]).to(dtype)
    host = normal(tokens, WIDTH + padded)
    if space == "hidden":
        host[:, WIDTH:] = both[:, :hidden].float() @ lift
    else:
        host[:, WIDTH + rank :] = 0
    gate = proj[:, -1] if gate_kind == "logit" else torch.full((1,), -2.0, device=device)
    rest = (normal(tokens, WIDTH), stack, normal(WIDTH), normal(WIDTH), normal(WIDTH), both[:, hidden:])
    gram = stack[-padded:, hidden:] if dtype == torch.bfloat16 else bottom[:, hidden:]
    return Inputs(both[:, :hidden], proj[:, :padded], proj[:, padded:], gate, gram, host.to(dtype), *rest)


def in_use(kind: str, x: Inputs, *, save: bool, norm: bool) -> tuple[Tensor, ...]:
    space, rank, gate_kind = TABLES[kind]
    saved = triton_complement.coefficients(
        *(x.b, x.u, x.v, x.gate, x.stack, x.gram),
        **{"rank": rank, "space": space, "normalise": True, "gate_kind": gate_kind, "eps": EPS},
        save=save,
        out=x.z,
        t=x.host[:, WIDTH:],
    )
    z = x.z[:, : x.padded]
    y = triton_complement.combination(x.host[:, :WIDTH], z, x.stack, x.bias, saved.keep, x.residual)
    if not norm:
        return y, saved.gp
    _, n, stats = triton_norm.forward(y, None, x.gamma, x.beta, EPS, x.u.dtype)
    return y, saved.gp, n, stats


def host_alone(x: Inputs, y: Tensor) -> tuple[Tensor | None, ...]:
    return triton_norm.forward(x.residual, y, x.gamma, x.beta, EPS, x.u.dtype)


def as_one(
    kind: str, x: Inputs, *, save: bool, norm: bool, block_t: int, block_d: int, warps: int
) -> tuple[Tensor, ...]:
    space, rank, gate_kind = TABLES[kind]
    (tokens, hidden), dtype, full = x.b.shape, x.u.dtype, space == "hidden"
    y = torch.empty_like(x.residual)
    n = torch.empty_like(y, dtype=dtype) if norm else y
    stats = y.new_empty(2, tokens if norm and save else 0)
    gp = x.u.new_empty(tokens if save else 0, x.padded)
    numbers = [y.new_empty(tokens if save and wanted else 0) for wanted in (True, full, full)]
    _output[(cdiv(tokens, block_t),)](
        *(x.b, x.u, x.v, x.gate, x.gram, x.host[:, WIDTH:], x.host, x.residual, x.stack, x.bias, x.gamma, x.beta),
        *(x.z, gp, *numbers, y, n, stats, tokens, EPS, LEAST_KEEP[dtype], EPS),
        *(hidden, rank, x.padded, WIDTH, x.b.stride(0), x.u.stride(0), x.gate.stride(0) if gate_kind == "logit" else 0),
        *(x.host.stride(0), x.gram.stride(0), x.host.stride(0), x.z.shape[1], x.z.stride(0)),
        SPACE=SPACES[space],
        GATE=GATES[gate_kind],
        SAVE=save,
        NORM=norm,
        PRECISION="tf32" if dtype != torch.float32 else "tf32x3",
        BLOCK_T=block_t,
        BLOCK_R=lanes(x.padded),
        BLOCK_D=block_d,
        BLOCK_K=256,
        num_warps=warps,
        num_stages=1,
    )
    return (y, gp, n, stats) if norm else (y, gp)


def compare(kind: str, x: Inputs, save: bool, norm: bool, **blocks: int) -> float:
    """The largest error of one kernel's results over the RMS of those in use."""
    want = in_use(kind, x, save=save, norm=norm)
    z = x.z.clone()
    x.z.fill_(float("nan"))
    got = as_one(kind, x, save=save, norm=norm, **blocks)
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if a.shape == b.shape]
    if save:
        pairs.append((x.z, z))
    return max(
        float((a.float() - b.float()).abs().max() / b.float().square().mean().sqrt()) for a, b in pairs if b.numel()
    )


def microseconds(work: Callable[[Inputs], object], sets: list[Inputs]) -> float:
    """Of one launch, by graphs that go round all sets of inputs."""
    for x in sets:
        work(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in sets:
            work(x)
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(sets))
    return sorted(times)[len(times) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    if not on_kernels(torch.zeros(1, device=device)):
        raise SystemExit("no kernel runs here: it takes a GPU and Triton, or TRITON_INTERPRET=1")
    tokens, hidden, dtype = (512 * 64, 664, torch.bfloat16) if cuda else (40, 72, torch.float32)
    until, rows = time.monotonic() + 60 * args.minutes, []
    record: dict[str, Any] = {"environment": environment(device), "rows": rows}
    for norm, kind, save in itertools.product((True, False), TABLES, (False, True)):
        sets = [make(kind, tokens, hidden, device, dtype, seed) for seed in range(SETS if cuda else 1)]
        tiles = [(t, 256, w) for t in (16, 32) for w in (4, 8)]
        tiles += [(64, 256, 8)] if norm else [(t, d, w) for t in (32, 64) for d, w in ((64, 4), (128, 4), (128, 8))]
        row: dict[str, Any] = {"complement": kind, "norm": norm, "save": save}
        if cuda:
            row["in_use_us"] = microseconds(partial(in_use, kind, save=save, norm=norm), sets)
            if norm:  # what the host alone would take, with its output at hand
                row["host_us"] = microseconds(partial(host_alone, y=sets[0].host[:, :WIDTH].contiguous()), sets)
        for block_t, block_d, warps in tiles if cuda else tiles[:1] + tiles[-2:]:
            if time.monotonic() > until:
                break
            blocks = {"block_t": block_t, "block_d": block_d, "warps": warps}
            found = {**blocks, "error": compare(kind, sets[0], save, norm, **blocks)}
            if cuda:
                found["us"] = microseconds(partial(as_one, kind, save=save, norm=norm, **blocks), sets)
            row.setdefault("one_kernel", []).append(found)
        rows.append(row)
        print(json.dumps({**row, "one_kernel": sorted(row.get("one_kernel", []), key=lambda f: f.get("us", 0))[:3]}))
    if args.out:
        write_whole(args.out, json.dumps(record, indent=1) + "\n")
    worst = max((f["error"] for row in rows for f in row.get("one_kernel", [])), default=float("inf"))
    bound = 0.05 if cuda else 1e-4
    print(f"largest difference {worst:.1e}, allowed {bound:.0e}")
    return int(not worst <= bound)


if __name__ == "__main__":
    sys.exit(main())
