"""Training step of an injected ViT-B/16 against the plain one, side by side; writes a record to results/integrations.

    python benchmarks/inject_vit_base.py [--complement lowrank] [--rank 64] [--by-block] [--graph] [--minutes 4]
        [--mode reduce-overhead] [--backend torch]

Both models run forward, backward and fused AdamW in bf16 autocast, compiled, on images made on the device. They take
turns in short rounds, so that clocks and heat are the same for both; the ratio is the median over the rounds. Nothing
is measured unless the injected model follows the literal equations. Compiling is timed apart; `--by-block` compiles a
block once for all twelve instead of the whole model, in a fraction of the time. `--graph` replays the compiled step
from one CUDA graph, so that the host's launches cost nothing; `--mode reduce-overhead` leaves that to torch.compile,
whose graphs hold forward and backward. Both, and another backend than `auto`, show in the record and in its name. The
record is written after each round, and rounds end with the given minutes; the time in which the GPU was busy, profiled
at the end, stands beside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn
from torch.nn import functional as F

from oqc.integrations import inject
from oqc.train.environment import environment

MODEL, SIZE, CLASSES = "vit_base_patch16_224", 224, 1000


def make(args: argparse.Namespace, device: torch.device, *, injected: bool) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(args.model).to(device).train()
    if injected:
        inject(model, args.complement, rank=args.rank, init="paper", backend=args.backend, seed=0)
    return model


def check(model: nn.Module, device: torch.device) -> float:
    """Relative error of the injected model's output in bf16 against its own literal form in float32."""
    x = torch.randn(2, 3, SIZE, SIZE, device=device)
    mlps: list[Any] = [part for part in model.modules() if hasattr(part, "oqc_backend")]
    kept = mlps[0].oqc_backend
    model.eval()
    with torch.no_grad():
        with torch.autocast(device.type, torch.bfloat16):
            y = model(x).double()
        for part in mlps:
            part.oqc_backend = "reference"
        truth = model(x).double()
    for part in mlps:
        part.oqc_backend = kept
    model.train()
    error = ((y - truth).norm() / truth.norm()).item()
    if error > 0.05:
        raise SystemExit(f"the injected model differs from its literal form by {error:.3f}: not measured")
    return error


def step_of(model: nn.Module, args: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda, capturable=cuda)
    parts: Any = model.blocks if args.by_block else [model]
    for module in parts:
        module.compile(fullgraph=True, mode=args.mode)
    images = torch.randn(args.batch, 3, SIZE, SIZE, device=device)
    labels = torch.randint(CLASSES, (args.batch,), device=device)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()  # what the last step's graphs wrote is used up
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Replay(step) if args.graph else step


class Replay:
    """A step from one CUDA graph. Keeps the step itself: the graph works in the memory of its batch and optimizer."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step, self.graph = step, torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=side):
            step()

    def __call__(self) -> None:
        self.graph.replay()


def busy_ms(step: Callable[[], None], device: torch.device, steps: int = 3) -> tuple[float, dict[str, float]]:
    """Milliseconds a step in which the GPU runs a kernel, and the longest kernels, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds(step, steps, device)
    times = {event.key[:90]: event.self_device_time_total / steps / 1e3 for event in profile.key_averages()}
    longest = sorted(times, key=lambda key: -times[key])[:40]
    return sum(times.values()), {key: round(times[key], 4) for key in longest}


def seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--complement", default="lowrank")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--by-block", action="store_true")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--mode", default="default", choices=("default", "reduce-overhead"))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=Path("results/integrations"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.graph and args.mode != "default":
        parser.error(f"--graph takes only --mode default, got --mode {args.mode}: it makes CUDA graphs of its own")
    if args.graph and device.type != "cuda":
        parser.error("--graph needs a GPU, and there is none")

    began = time.perf_counter()
    os.environ.setdefault("TEARDOWN_CUPTI", "0")  # a second profile of a CUDA graph crashes once the first is torn down
    torch.backends.cuda.enable_cudnn_sdp(False)  # its bf16 gradients were NaN elsewhere (docs/deviations.md)
    models = {"plain": make(args, device, injected=False), "injected": make(args, device, injected=True)}
    error = check(models["injected"], device)
    parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    steps, ready = {}, {}
    for name, model in models.items():
        start = time.perf_counter()
        steps[name] = step_of(model, args, device)
        seconds(steps[name], 1, device)
        ready[name] = time.perf_counter() - start
    for step in steps.values():
        seconds(step, args.warmup, device)
    gpu = torch.cuda.get_device_name().lower().replace(" ", "-") if device.type == "cuda" else "cpu"
    name = f"{gpu}-{args.model}-{args.complement}-r{args.rank}"
    name += f"-{args.backend}" if args.backend != "auto" else ""
    name += f"-{args.mode}" if args.mode != "default" else ""
    path = args.out / (name + ("-graph.json" if args.graph else ".json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {
        "environment": environment(device),
        "model": args.model,
        "complement": args.complement,
        "rank": args.rank,
        "backend": args.backend,
        "batch": args.batch,
        "precision": "bf16 autocast",
        "compiled": "by block" if args.by_block else "whole",
        "mode": args.mode,
        "graph": args.graph,
        "parameters": parameters,
        "error_to_literal_form": error,
        "compile_s": ready,
        "steps_per_round": args.steps,
    }
    rounds: list[dict[str, float]] = []
    while len(rounds) < args.rounds and (not rounds or time.perf_counter() - began < 60 * args.minutes):
        rounds.append({name: seconds(step, args.steps, device) for name, step in steps.items()})
        found = measured(rounds, args.batch)
        path.write_text(json.dumps(about | found, indent=1) + "\n")
    if device.type == "cuda":  # last: what the profiler leaves behind can slow launches
        kernels = {name: busy_ms(step, device) for name, step in steps.items()}
        about |= {"gpu_busy_ms": {one: kernel[0] for one, kernel in kernels.items()}}
        about |= {"longest_kernels_ms": {one: kernel[1] for one, kernel in kernels.items()}}
        path.write_text(json.dumps(about | found, indent=1) + "\n")
    print(
        json.dumps({name: value for name, value in (about | found).items() if not name.startswith(("env", "longest"))})
    )


def measured(rounds: list[dict[str, float]], batch: int) -> dict[str, Any]:
    rates = {name: [batch / one[name] for one in rounds] for name in rounds[0]}
    ratios = [one["plain"] / one["injected"] for one in rounds]
    return {
        "rounds": len(rounds),
        "images_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "images_per_s_low_high": {name: [min(values), max(values)] for name, values in rates.items()},
        "ratio": statistics.median(ratios),
        "ratio_low_high": [min(ratios), max(ratios)],
    }


if __name__ == "__main__":
    main()
