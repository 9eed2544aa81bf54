"""A data set, a model and configs small enough for hundreds of steps in a second."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oqc.config import Data, Run, Train
from oqc.data import Dataset, Split
from oqc.train import Summary, Trainer
from oqc.train.stopping import Stopped, StopRequest

CLASSES = 4


def tiny_data(train: int = 64, val: int = 0, test: int = 30) -> Dataset:
    """Brightness tells the class, under noise."""
    generator = torch.Generator().manual_seed(0)

    def split(n: int) -> Split:
        labels = torch.arange(n) % CLASSES
        noise = torch.randint(0, 100, (n, 1, 4, 4), generator=generator)
        return Split((noise + 40 * labels[:, None, None, None]).to(torch.uint8), labels)

    return Dataset(
        name="tiny",
        classes=("a", "b", "c", "d"),
        mean=(0.4,),
        std=(0.25,),
        train=split(train),
        val=split(val) if val else None,
        test=split(test),
        digest="tiny",
    )


class Block(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.mix(self.norm(x))))


class TinyNet(nn.Module):
    compilable = ("read",)

    def __init__(self, seed: int = 0, width: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Linear(16, width)
            self.blocks = nn.ModuleList([Block(width, drop) for _ in range(3)])
            self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.read(x)

    def read(self, x: Tensor) -> Tensor:
        return self.head(x)


def tiny_config(data: dict[str, Any] | None = None, **train: Any) -> Run:
    defaults: dict[str, Any] = {"epochs": 4, "batch": 8, "lr": 1e-2, "warmup": 1.0, "precision": "fp32"}
    augment: dict[str, Any] = {"name": "tiny", "crop": 1, "flip": True}
    return Run(data=Data(**augment | (data or {})), train=Train(**defaults | train))


def tiny_trainer(
    config: Run | None = None, folder: Path | None = None, *, drop: float = 0.0, val: int = 0, **options: Any
) -> Trainer:
    config = config or tiny_config()
    options.setdefault("device", "cpu")
    return Trainer(TinyNet(config.train.seed, drop=drop), tiny_data(val=val), config, folder, **options)


def run_until(trainer: Trainer, step: int, number: int) -> None:
    """Trains up to a step and stops it there as a signal would."""
    stop = StopRequest()
    try:
        for _ in trainer.run(stop):
            if trainer.done == step:
                stop.signal = number
    except Stopped:
        return
    raise AssertionError(f"the run went on after step {step}")


def poison(trainer: Trainer, steps: Iterable[int]) -> None:
    """Makes the images of these steps NaN, on the device, as a function of the step."""
    batches = trainer.step.batches
    sound, bad = batches.next, torch.tensor(list(steps), device=trainer.device)

    def next_(step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, *rest = sound(step)
        return (torch.where((bad == step).any(), torch.nan, x), *rest)

    batches.next = next_  # type: ignore[method-assign]


def without_times(summary: Summary) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "images_per_s")} for row in summary.history]
