"""Asks whether a network's last kernel should make the next norm too: `oqc.ops.norm.AHEAD`, off until this was run.

    python benchmarks/next_norm.py [--minutes 7] [--out results/bench/next-norm-nvidia-h200.json]

In use are a kernel for z, one that adds M z and the residual, and one for the norm of the sum. Ahead, the first does
all three: a program holds whole rows of the output. First the kernels alone, from a cold cache, for some blocks of
tokens, warps and registers, each held against the three; then, with the block that is fastest in low-rank's training
among those that are right for all, whole training steps and inference of Deep-ViT by both ways in turn, a model after
the other, each beside its host, in one process. The record is written after each. Without a GPU, under
TRITON_INTERPRET=1, it only compares the kernels.
"""

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
from torch import Tensor

from oqc.config import Train
from oqc.experiments.bench import Case, Prepared
from oqc.files import write_whole
from oqc.models.registry import model_config
from oqc.ops import norm, triton_complement, triton_norm
from oqc.ops.device import on_kernels
from oqc.ops.layout import aligned
from oqc.train.environment import environment
from oqc.train.step import room_for_compiled_models

WIDTH, TABLES = 256, {"lowrank": ("rank", 56, "beta"), "full": ("hidden", 64, "beta"), "dynamic": ("rank", 83, "logit")}
HOST, MODELS = "deep_vit_afbo", ("deep_vit_afbo_lowrank_r56", "deep_vit_afbo_full_r64", "deep_vit_afbo_dynamic_r83")
# Of a program: tokens, warps, and registers a thread at the most (None: the compiler's choice).
BLOCKS = [(32, 8, None), (16, 8, None), (16, 4, None), (64, 8, None), (32, 8, 128), (16, 8, 128)]
BOUND = 0.05  # a difference may be
SETS = 6  # of inputs that take turns: together several times the cache
EPS, ROUNDS, STEPS = 1e-6, 7, 30


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


def kernels(kind: str, x: Inputs, *, save: bool, ahead: bool) -> dict[str, Tensor]:
    """The residual sum, its norm, mean and 1 / standard deviation, and with `save` z and G p."""
    space, rank, gate_kind = TABLES[kind]
    then = None
    if ahead:
        y = torch.empty_like(x.residual)
        made = (y, torch.empty_like(y, dtype=x.u.dtype), y.new_empty(2, len(y)))
        then = triton_complement.Next(x.host[:, :WIDTH], x.stack, x.bias, x.residual, x.gamma, x.beta, EPS, *made)
    saved = triton_complement.coefficients(
        *(x.b, x.u, x.v, x.gate, x.stack, x.gram),
        **{"rank": rank, "space": space, "normalise": True, "gate_kind": gate_kind, "eps": EPS},
        save=save,
        out=x.z,
        t=x.host[:, WIDTH:],
        then=then,
    )
    if not ahead:
        z = x.z[:, : x.gram.shape[0]]
        y = triton_complement.combination(x.host[:, :WIDTH], z, x.stack, x.bias, saved.keep, x.residual)
        made = (y, *triton_norm.forward(y, None, x.gamma, x.beta, EPS, x.u.dtype)[1:])
    found = dict(zip(("s", "n", "stats"), made, strict=True))
    return found | ({"z": x.z, "gp": saved.gp} if save else {})


def compare(kind: str, x: Inputs, save: bool) -> float:
    """The largest difference of the one kernel's results from the three's, over their RMS; what is rounded may be the
    next number."""
    want = {name: item.clone() for name, item in kernels(kind, x, save=save, ahead=False).items()}
    x.z.fill_(float("nan"))
    got, worst = kernels(kind, x, save=save, ahead=True), 0.0
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


def choose(block: tuple[int, int, int | None]) -> None:
    triton_complement.NEXT_TOKENS, triton_complement.NEXT_WARPS, triton_complement.NEXT_REGISTERS = block


def blocks_of(kind: str, save: bool, device: torch.device, until: float) -> dict[str, Any]:
    """All blocks, by time."""
    cuda = device.type == "cuda"
    tokens, hidden, dtype = (512 * 64, 664, torch.bfloat16) if cuda else (40, 72, torch.bfloat16)
    sets = [make(kind, tokens, hidden, device, dtype, seed) for seed in range(SETS if cuda else 1)]
    row: dict[str, Any] = {"complement": kind, "save": save, "ahead": []}
    if cuda:
        row["in_use_us"] = microseconds(partial(kernels, kind, save=save, ahead=False), sets)
        row["host_us"] = microseconds(partial(host_alone, y=sets[0].host[:, :WIDTH].contiguous()), sets)
    for block in BLOCKS if cuda else BLOCKS[:1]:
        if time.monotonic() > until:
            break
        choose(block)
        found: dict[str, Any] = {"block": block, "right": False}
        try:
            error = compare(kind, sets[0], save)
            found |= {"right": error <= BOUND, "error": error if error < float("inf") else None}
            if cuda:
                found["us"] = microseconds(partial(kernels, kind, save=save, ahead=True), sets)
        except Exception as failure:  # it does not compile, or asks for too much: one of several, which may do without
            found["failed"] = repr(failure)[:300]
        row["ahead"].append(found)
    row["ahead"].sort(key=lambda found: found.get("us", float("inf")))
    return row


def networks(name: str, device: torch.device) -> list[dict[str, Any]]:
    """Milliseconds a step and a batch of inference: a model by both ways and its host, in turn."""
    prepared: list[tuple[dict[str, Any], Prepared]] = []
    with room_for_compiled_models():
        for phase, (model, ahead) in itertools.product(
            ("train", "inference"), ((HOST, False), (name, False), (name, True))
        ):
            norm.AHEAD = ahead
            case = Case(model_config(model), "triton", "graph", phase)
            one = Prepared(case, device, Train(batch=512, precision="bf16", mode="graph", backend="triton"))
            prepared.append(({"model": model, "phase": phase, "ahead": ahead}, one))
    norm.AHEAD = False
    times = [[one.time(STEPS) for _, one in prepared] for _ in range(ROUNDS)]
    for (row, one), found in zip(prepared, zip(*times, strict=True), strict=True):
        ordered = sorted(1e3 * t for t in found)
        row |= {"ms": ordered[ROUNDS // 2], "least": ordered[0], "most": ordered[-1]}
        row |= {"busy_ms": one.busy_ms(), "compile_s": one.compile_s}
    return [row for row, _ in prepared]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.0, help="no block or model is begun after so many")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not on_kernels(torch.zeros(1, device=device)):
        raise SystemExit("no kernel runs here: it takes a GPU and Triton, or TRITON_INTERPRET=1")
    until = time.monotonic() + 60 * args.minutes
    record: dict[str, Any] = {"environment": environment(device), "kernels": [], "networks": []}

    def keep() -> None:
        if args.out:
            write_whole(args.out, json.dumps(record, indent=1) + "\n")

    for kind, save in itertools.product(TABLES, (True, False)):
        row = blocks_of(kind, save, device, until - 30 * args.minutes)  # half of the time at the most
        record["kernels"].append(row)
        print(json.dumps({**row, "ahead": row["ahead"][:3]}), flush=True)
        keep()
    right = [{found["block"] for found in row["ahead"] if found["right"]} for row in record["kernels"]]
    usable = set.intersection(*right)
    wrong = {found["block"] for row in record["kernels"] for found in row["ahead"]} - usable
    print(f"right for all: {sorted(usable, key=str)}; not: {sorted(wrong, key=str)}", flush=True)
    if device.type == "cuda" and usable:
        choose(next(found["block"] for found in record["kernels"][0]["ahead"] if found["block"] in usable))
        for name in MODELS:
            if time.monotonic() > until:
                break
            rows = networks(name, device)
            record["networks"] += rows
            keep()
            for row in rows:
                print(json.dumps(row), flush=True)
    return int(not usable)


if __name__ == "__main__":
    sys.exit(main())
