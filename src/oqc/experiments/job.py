"""One run and its record. A record is of a run that ended or diverged, and holds no path and no name of the machine."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from oqc import config as configs
from oqc.analysis import METRICS, mechanism_on_test
from oqc.config import Data, Run
from oqc.data import Dataset, load
from oqc.models import create_model
from oqc.report import Record
from oqc.train import Progress, Row, Summary, Trainer, replay_rate

ALONE = 60  # steps of a measurement


@dataclass(frozen=True)
class Job:
    """One run under its name."""

    preset: str
    run: Run

    @property
    def seed(self) -> int:
        return self.run.train.seed

    def __str__(self) -> str:
        return f"{self.preset}, seed {self.seed}"


Outcome = tuple[Job, Record]


class OutOfTime(RuntimeError):
    """A run would take longer than it may."""


class Limited:
    """Tells another progress, and ends a run at its first evaluation if it would take more than `seconds` in all."""

    def __init__(self, inner: Progress, epochs: int, seconds: float) -> None:
        self.inner, self.epochs, self.seconds = inner, epochs, seconds
        self.began: float | None = time.monotonic()
        self.status, self.note = inner.status, inner.note

    def evaluated(self, row: Row) -> None:
        self.inner.evaluated(row)
        if self.began is None:
            return
        whole = time.monotonic() - self.began + row["seconds"] * (self.epochs / row["epoch"] - 1)
        self.began = None
        if whole > self.seconds:
            raise OutOfTime(f"it would take about {whole:.0f} s here")


@functools.lru_cache(maxsize=2)
def _dataset(data: Data) -> Dataset:
    return load(data)


class Built:
    """A run ready to start, with the time it took to build."""

    def __init__(self, job: Job, device: torch.device, progress: Progress) -> None:
        began = time.perf_counter()
        run = job.run
        self.job, self.data = job, _dataset(run.data)
        model = create_model(run.model, seed=run.train.seed, backend=run.train.backend)
        self.trainer = Trainer(model, self.data, run, device=device, progress=progress)
        self.seconds = time.perf_counter() - began
        self.alone: float | None = None  # images/s

    def measure_alone(self) -> None:
        """The throughput of bare steps; for when nothing else uses the device."""
        self.trainer.prepare()  # its summary has the time
        began = time.perf_counter()
        self.alone = replay_rate([self.trainer], ALONE)
        self.seconds += time.perf_counter() - began

    def record(self, summary: Summary, *, at_once: int = 1) -> Record:
        """What is kept of a finished run; the environment comes later, it is the same for all."""
        began = time.perf_counter()
        found = self._mechanism()
        seconds = self.seconds + summary.prepare_seconds + time.perf_counter() - began
        return {
            **self._about(summary.history, at_once),
            "best": summary.best,
            "final": summary.final,
            "parameters": summary.parameters,
            "images_per_s": summary.images_per_s,
            "mechanism": found,
            "seconds": summary.seconds,
            "setup_seconds": seconds,
        } | ({} if self.alone is None else {"images_per_s_alone": self.alone})

    def diverged(self, *, at_once: int = 1) -> Record:
        """What is kept of a run that diverged, by its trainer, which was stopped where it is. How soon the host noticed
        plays no part but in the step."""
        done, trainer = self.trainer.done, self.trainer
        epoch = -(-done // trainer.per_epoch)
        before = [row for row in trainer.history if row["epoch"] < epoch]
        where = {"epoch": epoch, "step": done}
        return {**self._about(before, at_once), "diverged": where, "seconds": trainer.seconds}

    def _about(self, history: Sequence[Row], at_once: int) -> Record:
        """What every record has."""
        return {
            "preset": self.job.preset,
            "seed": self.job.seed,
            "per_epoch": [{"epoch": row["epoch"], "test": row["test_accuracy"]} for row in history],
            "config": configs.to_dict(without_root(self.job.run)),
            "at_once": at_once,
        }

    def _mechanism(self) -> dict[str, float | None]:
        trainer = self.trainer
        try:
            return mechanism_on_test(trainer.evaluated, self.data, self.job.run.train, trainer.device)
        except RuntimeError as error:  # out of memory, no convergence: the run is worth keeping without it
            trainer.progress.note(f"{self.job}: no mechanism metrics, {error}")
            return dict.fromkeys(METRICS)


def without_root(run: Run) -> Run:
    """The config without the place of the data on this machine."""
    return replace(run, data=replace(run.data, root=None))
