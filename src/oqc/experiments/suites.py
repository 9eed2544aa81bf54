"""The paper's tables and our controls as suites of presets, and the command that fills what is missing of them.

All runs of a data set go into one results file, a record a run. A (preset, seed) that stands there is not run again,
in whichever suite it is; so a suite can be stopped at any time and goes on from its file, on this machine or another.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from oqc import config as configs
from oqc.config import Run, check_choice
from oqc.data import load
from oqc.experiments import presets, protocol
from oqc.experiments.digits import on_digits
from oqc.experiments.job import Job, OutOfTime, without_root
from oqc.experiments.running import cpu_workers, train_jobs
from oqc.files import check_folder
from oqc.report import Record, append_record, finished, read_records
from oqc.report.provenance import machine_of
from oqc.report.records import is_timed
from oqc.train import Progress, RunFolder, Silent, Stopped, find_device
from oqc.train.environment import environment
from oqc.train.stopping import stop_on_signals

RESULTS = "runs.jsonl"
DATA = ("cifar100", "digits")

TABLE_1 = (
    "cifar100_afbo",
    "cifar100_full_r64",
    "cifar100_lowrank_r56",
    "cifar100_static_r83",
    "cifar100_dynamic_r83",
)
SUITES: dict[str, tuple[str, ...]] = {
    "table1": TABLE_1,
    "designs": (
        "cifar100_afbo",
        "cifar100_lowrank_r56",
        "cifar100_shared_r56",
        "cifar100_unprojected_r56",
        "cifar100_ungated_r56",
    ),
    "capacity": (*TABLE_1, "cifar100_afbo_6_97m", "cifar100_afbo_7_19m", "cifar100_afbo_7_59m"),
    "decomposition": (
        "cifar100_mlp_nopr",
        "cifar100_mlp",
        "cifar100_mlp_lowrank_r56_nopr",
        "cifar100_mlp_lowrank_r56",
        "cifar100_afbo_nopr",
        "cifar100_afbo",
        "cifar100_lowrank_r56_nopr",
        "cifar100_lowrank_r56",
    ),
    "rank-sweep": (
        "cifar100_afbo",
        *(f"cifar100_{kind}_r{rank}" for rank in (16, 32, 48, 56, 64) for kind in ("full", "lowrank")),
    ),
    "gate-start": (
        "cifar100_afbo",
        "cifar100_lowrank_r56",
        "cifar100_static_r83",
        "cifar100_static_r83_closed",
        "cifar100_unprojected_r56",
        "cifar100_unprojected_r56_closed",
    ),
    "hosts": (
        "cifar100_afbo_grouped",
        "cifar100_afbo_grouped_lowrank_r56",
        "cifar100_swiglu",
        "cifar100_swiglu_lowrank_r56",
    ),
    "vit-tiny": ("cifar100_vit_tiny", "cifar100_vit_tiny_pr"),
    "calibration": ("cifar100_afbo_45epochs", "cifar100_afbo_50epochs", "cifar100_afbo"),
}
SUITES["all"] = tuple(dict.fromkeys(itertools.chain(*(SUITES[name] for name in SUITES if name != "calibration"))))


def run_of(preset: str, seed: int, data: str = "cifar100", epochs: int | None = None) -> Run:
    """The config of a preset on a data set. `epochs` takes the place of the frozen protocol's number; a preset that
    differs in it (calibration) keeps its proportion."""
    run = presets.get(preset)
    proportion = run.train.epochs / protocol.CIFAR100_TRAIN.epochs
    usual = {"cifar100": protocol.CIFAR100_TRAIN, "digits": protocol.DIGITS_TRAIN}[data].epochs
    if data == "digits":
        run = on_digits(run)
    number = max(1, round(proportion * (epochs or usual)))
    return replace(run, train=replace(run.train, epochs=number, seed=seed))


def plan(suite: str, seeds: int, data: str = "cifar100", epochs: int | None = None) -> list[Job]:
    """All runs of a suite, seed 0 of every preset first: wherever it is stopped, the presets stand alike."""
    check_choice("suite", suite, SUITES)
    check_choice("data", data, DATA)
    configs.check_positive("seeds", seeds)
    return [Job(name, run_of(name, seed, data, epochs)) for seed in range(seeds) for name in SUITES[suite]]


class Watch(Protocol):
    """Who is told how a suite goes on. Times are in seconds; `left` is None until one is known."""

    def begin(self, done: int, total: int, left: float | None) -> None: ...
    def run(self, job: Job) -> Progress: ...
    def end(self, job: Job, found: Record, left: float | None) -> None: ...


class Unwatched:
    def begin(self, done: int, total: int, left: float | None) -> None: ...
    def run(self, job: Job) -> Progress:
        return Silent()

    def end(self, job: Job, found: Record, left: float | None) -> None: ...


@dataclass(frozen=True)
class Result:
    """`records` of the suite so far, in its order; `left` are the jobs without one."""

    records: list[Record]
    left: list[Job]
    signal: int | None  # that ended it


def reproduce(
    suite: str,
    results: Path,
    *,
    seeds: int = 3,
    data: str = "cifar100",
    data_dir: Path | None = None,
    epochs: int | None = None,
    minutes: float | None = None,
    device: str | None = None,
    workers: int | None = None,
    watch: Watch | None = None,
    shared: bool = False,
) -> Result:
    """Runs what `results`/runs.jsonl lacks of a suite, and returns what there is then.

    With `minutes` no run is started that would not end in time; before any is known, the first show it after their
    first epoch, and a time that is too short for one is an error. SIGINT and SIGTERM drop the runs under way. A run
    that diverges is recorded as such and not run again: it would come to the same. `shared`: other work uses the
    device, and the records say so.
    """
    began, watch, own = time.monotonic(), watch or Unwatched(), find_device(device)
    jobs = plan(suite, seeds, data, epochs)
    if minutes is not None:
        configs.check_not_negative("--minutes", minutes)
    if data_dir is not None and data == "digits":
        raise ValueError(f"--data-dir is for cifar100, the digits come with scikit-learn; got {data_dir}")
    if data_dir is not None and not data_dir.exists():
        raise ValueError(f"--data-dir must be the folder or archive of {data}, got {data_dir}, which does not exist")
    check_folder("--results", results)
    path = results / RESULTS
    if path.exists() and not os.access(path, os.W_OK):
        raise ValueError(f"--results {results}: {path} cannot be written")

    def read() -> tuple[dict[tuple[str, int], Record], list[Job]]:
        """The records by preset and seed, and the jobs without one."""
        records = {(r["preset"], r["seed"]): r for r in (read_records(path) if path.exists() else [])}
        for record in records.values():
            _check_protocol(record, path, data, epochs)
        return records, [_with_root(job, data_dir) for job in jobs if (job.preset, job.seed) not in records]

    _, todo = read()
    if todo and minutes != 0:  # 0 asks what is left, which takes no data
        _load(todo[0].run)
    _make_folder(results)
    with RunFolder(results).held(), stop_on_signals() as stop:
        records, todo = read()
        side_by_side = cpu_workers(workers) if own.type == "cpu" else None
        alike = machine_of({"environment": environment(own)})
        known = [record for record in finished(records.values()) if machine_of(record) == alike]
        clock, signal = _Clock(known, side_by_side), None

        def left() -> float | None:
            return None if minutes is None else 60 * minutes - (time.monotonic() - began)

        refused: list[Job] = []

        def may_start(job: Job) -> bool:
            seconds = left()
            if seconds is not None and (clock.expected(job) or 0.0) > seconds:
                refused.append(job)
                return False
            return stop.signal is None

        def unknown(job: Job) -> float | None:
            return left() if clock.expected(job) is None else None

        watch.begin(len(jobs) - len(todo), len(jobs), clock.left(todo))
        options: dict[str, Any] = {"workers": workers, "watch": watch.run, "shared": shared}
        now = todo if minutes != 0 else []
        outcomes = train_jobs(now, own, stop, may_start=may_start, limit=unknown, **options)
        told, ended = began, 0
        with contextlib.closing(outcomes):  # whatever happens here, no run goes on behind it
            try:
                for job, found in outcomes if now else ():
                    ending = time.monotonic()
                    found, told = found | {"wall_seconds": ending - told}, ending
                    append_record(path, found)
                    records[job.preset, job.seed] = found
                    ended += 1
                    clock.add(found)
                    missing = [one for one in todo if (one.preset, one.seed) not in records]
                    watch.end(job, found, clock.left(missing))
            except Stopped as end:
                signal = end.signal
            except OutOfTime as end:
                raise ValueError(f"--minutes {minutes:g} is too short for a run: {end}") from None
        if refused and not ended and signal is None:
            needed = clock.expected(refused[0])
            why = "it was over before one could start" if needed is None else f"one takes about {needed:.0f} s here"
            raise ValueError(f"--minutes {minutes:g} is too short for a run: {why}")
    return Result(
        records=[records[job.preset, job.seed] for job in jobs if (job.preset, job.seed) in records],
        left=[job for job in jobs if (job.preset, job.seed) not in records],
        signal=signal or stop.signal,
    )


def _make_folder(results: Path) -> None:
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--results must be a folder that can be written, got {results}: {error.strerror}") from None


def _with_root(job: Job, data_dir: Path | None) -> Job:
    data = replace(job.run.data, root=None if data_dir is None else str(data_dir))
    return replace(job, run=replace(job.run, data=data))


def _load(run: Run) -> None:
    """The data set verified and packed, before the first run asks for it."""
    try:
        load(run.data)
    except ValueError as error:
        raise ValueError(f"--data-dir {run.data.root}: {error}" if run.data.root else str(error)) from None


def _check_protocol(record: Record, path: Path, data: str, epochs: int | None) -> None:
    """Refuses a results file with a run of another config than the one that would be run now under its name."""
    preset, seed = record["preset"], record["seed"]
    if preset not in presets.PRESETS:
        return
    where = f"{path} has {preset}, seed {seed}"
    try:
        then = configs.from_dict(Run, record["config"])
    except ValueError as error:
        raise ValueError(f"{where}, with a config that cannot be read: {error}") from None
    found = configs.differences(without_root(then), without_root(run_of(preset, seed, data, epochs)))
    if found:
        name, old, new = min(found, key=lambda item: item[0] != "data.name")  # which says most
        raise ValueError(
            f"{where}, with {name} {old}, but now it would be {new}; one results file holds one protocol: choose"
            " another folder with --results"
        )


class _Clock:
    """How long runs take: by those of this process, and until there is one by those `earlier` on such a machine."""

    def __init__(self, earlier: Sequence[Record], side_by_side: int | None = None) -> None:
        self.side_by_side = side_by_side  # how many at the same time, where that is known from the start
        self.earlier = [r for r in earlier if is_timed(r)] or [r for r in earlier if "seconds" in r]
        self.own = list[Record]()
        self.began, self.shares = time.monotonic(), 0.0

    def add(self, record: Record) -> None:
        self.own += finished([record])
        self.shares += _share(record)  # of one that diverged too, which took its time

    def expected(self, job: Job) -> float | None:
        """Of one run, set-up included: the median of its preset, else of all; None where nothing is known."""
        known = self._like(job)
        return statistics.median(map(_spent, known)) if known else None

    def _like(self, job: Job) -> list[Record]:
        known = self.own or self.earlier
        return [record for record in known if record["preset"] == job.preset] or known

    def left(self, todo: Sequence[Job]) -> float | None:
        """For all of `todo`, by how many are under way at the same time: as told, or as this process has shown."""
        if not (self.own or self.earlier):
            return None
        if self.side_by_side:
            ends = [0.0] * min(self.side_by_side, len(todo))  # of the processes: the first that is free takes the next
            for job in todo:
                heapq.heapreplace(ends, ends[0] + (self.expected(job) or 0.0))
            return max(ends, default=0.0)
        total = sum(statistics.median(map(_share, self._like(job))) for job in todo)
        if not self.own:
            return total
        return total * (time.monotonic() - self.began) / self.shares


def _spent(record: Record) -> float:
    seconds: float = record["seconds"] + record.get("setup_seconds", 0.0)
    return seconds


def _share(record: Record) -> float:
    """Of the time that the device had for all runs under way at once."""
    seconds: float = record["seconds"] / record.get("at_once", 1) + record.get("setup_seconds", 0.0)
    return seconds
