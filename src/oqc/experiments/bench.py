"""Throughput of whole training steps and of inference: hosts x complements x backends x modes, side by side.

All cases live in one process and take turns, so that a ratio between two of them compares the same minutes of the same
machine. A training step is the trainer's own: augmentation, forward, backward, clipping, AdamW. A fused case is timed
only after its output and gradients have been held against the float64 reference on this very device.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from oqc.config import FFN, Data, Model, Run, Train
from oqc.data import Dataset, Split
from oqc.models import counting, create_model
from oqc.models.registry import RANKS
from oqc.nn import OQCFFN
from oqc.train import Trainer
from oqc.train.numerics import autocast, numerics
from oqc.train.step import room_for_compiled_models

PARITY = {"fp32": 1e-5, "bf16": 1e-2}  # RMS error ratio against float64
SECONDS = 0.25  # a case in each of its turns
DRAWS = 8  # of inputs: a scalar's gradient is a sum of both signs, which may all but cancel for one of them


@dataclass(frozen=True)
class Case:
    model: Model
    backend: str
    mode: str  # eager, compiled, graph
    phase: str  # train, inference

    def row(self) -> dict[str, Any]:
        ffn = self.model.ffn
        return {
            "host": ffn.host,
            "complement": ffn.complement,
            "rank": ffn.rank if ffn.complement != "none" else None,
            "backend": self.backend,
            "mode": self.mode,
            "phase": self.phase,
        }


def cases(
    hosts: Sequence[str],
    complements: Sequence[str],
    backends: Sequence[str],
    modes: Sequence[str],
    phases: Sequence[str],
    *,
    base: Model | None = None,
    rank: int | None = None,
) -> list[Case]:
    """Every combination, each complement at `rank`, without one at the paper's."""
    base = base or Model()
    found = []
    for host, name, backend, mode, phase in itertools.product(hosts, complements, backends, modes, phases):
        own = RANKS.get(name, FFN().rank) if rank is None else rank
        ffn = replace(base.ffn, host=host, complement=name, rank=own)
        found.append(Case(replace(base, ffn=ffn), backend, mode, phase))
    return found


def run_bench(
    todo: Sequence[Case],
    *,
    device: torch.device,
    batch: int = 512,
    precision: str = "bf16",
    repeats: int = 7,
    on_ready: Callable[[Case], None] = lambda case: None,
) -> list[dict[str, Any]]:
    """Prepares every case, then times them in turn `repeats` times, each for about `SECONDS`."""
    for case in todo:
        check_parity(case.model, case.backend, device, precision)
    rates = device_rates(device)
    prepared = []
    with room_for_compiled_models():
        for case in todo:
            train = Train(batch=batch, precision=precision, mode=case.mode, backend=case.backend)
            prepared.append(Prepared(case, device, train))
            on_ready(case)
    steps = [max(2, round(SECONDS / one.time(3))) for one in prepared]
    taken = [[one.time(n) for one, n in zip(prepared, steps, strict=True)] for _ in range(repeats)]
    rows = []
    for one, times in zip(prepared, zip(*taken, strict=True), strict=True):
        speeds = torch.tensor([batch / t for t in times], dtype=torch.float64)
        p20, median, p80 = (speeds.quantile(q).item() for q in (0.2, 0.5, 0.8))
        floor = None
        if rates is not None:
            floor = counting.floor_seconds(
                one.case.model, batch, training=one.case.phase == "train", flops_per_s=rates[0], bytes_per_s=rates[1]
            )
        rows.append(
            one.case.row()
            | {
                "batch": batch,
                "precision": precision,
                "images_per_s": median,
                "p20": p20,
                "p80": p80,
                "repeats": repeats,
                "gpu_busy_ms": one.busy_ms(),
                "peak_memory_bytes": one.peak,
                "compile_s": one.compile_s,
                "floor_ms": None if floor is None else 1e3 * floor,
                "floor_share": None if floor is None else floor * median / batch,
            }
        )
    return rows


class Prepared:
    """One case, compiled and captured, ready to run any number of times."""

    def __init__(self, case: Case, device: torch.device, train: Train) -> None:
        self.case, self.device = case, device
        cuda = device.type == "cuda"
        before = torch.cuda.memory_allocated(device) if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        run = Run(model=case.model, data=Data(name="synthetic"), train=train)
        model = create_model(case.model, seed=0, backend=case.backend)
        self.trainer = Trainer(model, _synthetic(case.model, train.batch), run, device=device)
        self.enqueue: Callable[[], object]
        if case.phase == "train":
            self.trainer.prepare()
            self.enqueue = self.trainer.step.replay
        else:
            self.enqueue = self._inference(train.batch, train.precision)
        with self.trainer.scope():
            self.enqueue()
        self.trainer.synchronize()
        self.compile_s = time.perf_counter() - began
        self.peak = torch.cuda.max_memory_allocated(device) - before if cuda else None

    def _inference(self, batch: int, precision: str) -> Callable[[], object]:
        config = self.case.model
        model = self.trainer.model.eval()
        x = torch.randn(batch, config.channels, config.image_size, config.image_size, device=self.device)

        def forward() -> Tensor:
            with torch.no_grad(), autocast(self.device, precision):
                return model(x)

        if self.case.mode == "eager":
            return forward
        with self.trainer.scope():
            for _ in range(3):
                forward()
            if self.case.mode == "compiled":
                return forward
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.trainer.stream):
                forward()
        return graph.replay

    def time(self, steps: int) -> float:
        """Seconds a step."""
        self.trainer.synchronize()
        began = time.perf_counter()
        with self.trainer.scope():
            for _ in range(steps):
                self.enqueue()
        self.trainer.synchronize()
        return (time.perf_counter() - began) / steps

    def busy_ms(self, steps: int = 3) -> float | None:
        """Milliseconds a step in which the GPU runs a kernel, by the profiler."""
        if self.device.type != "cuda":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.time(steps)
        return sum(event.self_device_time_total for event in profile.key_averages()) / steps / 1e3


def _synthetic(config: Model, batch: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    shape = (4 * batch, config.channels, config.image_size, config.image_size)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    split = Split(images, torch.randint(0, config.num_classes, (4 * batch,), generator=generator))
    ones = (0.5,) * config.channels
    names = tuple(map(str, range(config.num_classes)))
    return Dataset("synthetic", names, ones, ones, split, None, split, "synthetic")


def device_rates(device: torch.device) -> tuple[float, float] | None:
    """FLOP/s of a large bf16 product on random data and bytes/s of a large copy, both measured now."""
    if device.type != "cuda":
        return None
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    source = torch.empty(2**30, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    product, copied = _median_time(lambda: a @ a), _median_time(lambda: target.copy_(source))
    return 2 * 8192**3 / product, 2 * source.numel() / copied


def _median_time(work: Callable[[], object]) -> float:
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def check_parity(config: Model, backend: str, device: torch.device, precision: str) -> None:
    """Raises where a backend's output or gradients stray from float64 by more than the bar and by more than 1.25 times
    what the literal equations in the same precision stray: the root mean square over some inputs."""
    if backend == "reference":
        return
    ffn, side = config.ffn, config.image_size // config.patch_size
    options: dict[str, Any] = {"host": ffn.host, "complement": ffn.complement, "rank": ffn.rank, "grid": (side, side)}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        options |= {"match": ffn.match if ffn.hidden is None else None, "groups": ffn.groups, "eps": ffn.eps}
        literal = OQCFFN(config.width, ffn.hidden, backend="reference", **options)
        inputs = torch.randn(DRAWS, 2, 4, side * side, config.width)
    fast, exact = copy.deepcopy(literal), copy.deepcopy(literal).double()
    fast.backend = backend
    with numerics(tf32=False, deterministic=False):
        want = _outputs_and_gradients(exact, inputs.double(), device, "fp64")
        plain = _outputs_and_gradients(literal, inputs, device, precision)
        got = _outputs_and_gradients(fast, inputs, device, precision)
    for name, truth in want.items():
        scale = truth.norm().clamp_min(1e-30)
        error, own = ((t[name].double() - truth).norm() / scale for t in (got, plain))
        if not error <= max(PARITY[precision], 1.25 * own):
            raise ValueError(
                f"backend {backend} fails parity for {ffn.host} with {ffn.complement} in {precision}: {name} is off"
                f" by {error:.1e}, the literal form by {own:.1e}; its speed is not worth telling"
            )


def _outputs_and_gradients(
    module: nn.Module, inputs: Tensor, device: torch.device, precision: str
) -> dict[str, Tensor]:
    """Of each pair of x and dy in `inputs`, along the first axis, as a block runs the network: with a residual to add,
    which is taken off again."""
    module, found = module.to(device), []
    for x, dy in inputs.to(device):
        rest = x.clone()
        tensors = {"x": x.requires_grad_()} | dict(module.named_parameters())
        with autocast(device, precision):
            y = module(x, residual=rest) - rest
            with torch.no_grad():
                again = module(x, residual=rest) - rest
        gradients = torch.autograd.grad(y, list(tensors.values()), dy.to(y.dtype))
        found.append([y.detach(), again, *gradients])
    names = ("y", "y in inference", *(f"gradient of {name}" for name in tensors))
    return {name: torch.stack(parts) for name, parts in zip(names, zip(*found, strict=True), strict=True)}
