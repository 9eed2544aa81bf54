"""Times what adds a network's output to the residual stream and makes the next block's norm of it, from a cold cache.

    python benchmarks/whole_rows.py [--out results/bench/whole-rows-nvidia-h200.json]

In three kernels (z; the sum with M z; the norm), in two (z; the rest), and for ranks of up to 64 lanes in one, with
different numbers of tokens and warps a program and of blocks on their way, each held against the three; beside what the
host has there without a complement. Without a GPU, under TRITON_INTERPRET=1, it only compares.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oqc.files import write_whole
from oqc.ops import triton_complement, triton_norm
from oqc.ops.device import on_kernels
from oqc.ops.layout import aligned
from oqc.train.environment import environment

WIDTH, TABLES = 256, {"lowrank": ("rank", 56, "beta"), "full": ("hidden", 64, "beta"), "dynamic": ("rank", 83, "logit")}
BLOCKS = [(32, 8, 3), (32, 8, 2), (16, 8, 3)]  # tokens and warps of a program, blocks on their way
BOUND = 0.05  # a difference may be
SETS = 6  # of inputs that take turns: together several times the cache
EPS = 1e-6


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


def make(kind: str, tokens: int, hidden: int, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
    """What stands before the kernels, laid out as the operator does (but that rows of u and v are nearer)."""
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


def kernels(kind: str, x: Inputs, *, save: bool, count: int) -> dict[str, Tensor]:
    """The residual sum, its norm, mean and 1 / standard deviation, and with `save` z and G p, by so many kernels."""
    space, rank, gate_kind = TABLES[kind]
    options: dict[str, Any] = {"rank": rank, "space": space, "normalise": True, "gate_kind": gate_kind, "eps": EPS}
    branch = (x.b, x.u, x.v, x.gate, x.stack, x.gram)
    options |= {"save": save, "out": x.z}
    z = x.z[:, : x.gram.shape[0]]
    if count == 3:
        saved = triton_complement.coefficients(*branch, **options, t=x.host[:, WIDTH:])
        y = triton_complement.combination(x.host[:, :WIDTH], z, x.stack, x.bias, saved.keep, x.residual)
        made = (y, *triton_norm.forward(y, None, x.gamma, x.beta, EPS, x.u.dtype)[1:])
    else:
        triton_complement.MOST_OWN_LANES = 64 if count == 1 else 0
        norm = (x.residual, x.gamma, x.beta, EPS)
        saved, *made = triton_complement.rows(*branch, x.bias, *norm, **options, host=x.host)
    found = dict(zip(("s", "n", "stats"), made, strict=True))
    return found | ({"z": z, "gp": saved.gp} if save else {})


def compare(kind: str, x: Inputs, save: bool, count: int) -> float:
    """The largest difference from what three kernels make, over its RMS; what is rounded may be the next number."""
    want = {name: item.clone() for name, item in kernels(kind, x, save=save, count=3).items()}
    x.z.fill_(float("nan"))
    got, worst = kernels(kind, x, save=save, count=count), 0.0
    for name, item in want.items():
        gap = (got[name].float() - item.float()).abs()
        if item.dtype != torch.float32:
            gap = (gap - torch.finfo(item.dtype).eps * item.float().abs()).clamp_min(0)
        error = gap.max() / item.float().square().mean().sqrt()
        worst = max(worst, error.item() if error.isfinite() else float("inf"))
    return worst


def host_alone(x: Inputs, y: Tensor) -> object:
    """What the host without a complement has there, its output at hand."""
    return triton_norm.forward(x.residual, y, x.gamma, x.beta, EPS, x.u.dtype)


def choose(block: tuple[int, int, int]) -> None:
    triton_complement.ROW_TOKENS, triton_complement.ROW_WARPS, triton_complement.ROW_STAGES = block


def rows_of(kind: str, save: bool, device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    tokens, hidden = (512 * 64, 664) if cuda else (40, 72)
    sets = [make(kind, tokens, hidden, device, torch.bfloat16, seed) for seed in range(SETS if cuda else 1)]
    row: dict[str, Any] = {"complement": kind, "save": save, "found": []}
    if cuda:
        row["three_us"] = microseconds(partial(kernels, kind, save=save, count=3), sets)
        row["host_us"] = microseconds(partial(host_alone, y=sets[0].host[:, :WIDTH].contiguous()), sets)
    for block, count in itertools.product(BLOCKS, (1, 2) if kind == "lowrank" else (2,)):
        choose(block)
        found: dict[str, Any] = {"block": block, "kernels": count, "error": compare(kind, sets[0], save, count)}
        if cuda:
            found["us"] = microseconds(partial(kernels, kind, save=save, count=count), sets)
        row["found"].append(found)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not on_kernels(torch.zeros(1, device=device)):
        raise SystemExit("no kernel runs here: it takes a GPU and Triton, or TRITON_INTERPRET=1")
    record: dict[str, Any] = {"environment": environment(device), "kernels": []}
    for kind, save in itertools.product(TABLES, (True, False)):
        record["kernels"].append(rows_of(kind, save, device))
        print(json.dumps(record["kernels"][-1]), flush=True)
        if args.out:
            write_whole(args.out, json.dumps(record, indent=1) + "\n")
    return int(any(not found["error"] <= BOUND for row in record["kernels"] for found in row["found"]))


if __name__ == "__main__":
    sys.exit(main())
