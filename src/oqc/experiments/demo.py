"""The method on data that needs no download: AFBO+PR and its four complements, shrunk, on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from oqc.data import load
from oqc.experiments import presets
from oqc.experiments.digits import on_digits
from oqc.experiments.job import Job
from oqc.experiments.protocol import DIGITS_DATA, DIGITS_TRAIN
from oqc.experiments.running import train_jobs
from oqc.experiments.suites import RESULTS
from oqc.report import Record, append_record
from oqc.train.stopping import StopRequest

EPOCHS = DIGITS_TRAIN.epochs
VARIANTS = {
    "AFBO+PR": presets.cifar100_afbo,
    "OQC full": presets.cifar100_full_r64,
    "OQC-LR": presets.cifar100_lowrank_r56,
    "OQC-static": presets.cifar100_static_r83,
    "OQC-dynamic": presets.cifar100_dynamic_r83,
}


def run_demo(
    out: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = EPOCHS,
    on_end: Callable[[Record], None] = lambda record: None,
    stop: StopRequest | None = None,
) -> list[Record]:
    """Trains every variant with every seed on the CPU and appends a record of each to `out`/runs.jsonl as it ends.

    Returned in the order of the variants; of a demo that was stopped, those there are.
    """
    load(DIGITS_DATA)  # verified and packed before the workers ask for it
    jobs = [_job(variant, seed, epochs) for variant in VARIANTS for seed in seeds]
    found: dict[Job, Record] = {}
    by_seed = sorted(jobs, key=lambda job: job.seed)  # so that what else the machine does falls on all variants
    for job, record in train_jobs(by_seed, torch.device("cpu"), stop or StopRequest()):
        if "diverged" in record:
            raise ValueError(f"{job}: diverged in epoch {record['diverged']['epoch']}")
        append_record(out / RESULTS, record)
        on_end(record)
        found[job] = record
    return [found[job] for job in jobs if job in found]


def _job(variant: str, seed: int, epochs: int) -> Job:
    run = on_digits(VARIANTS[variant]())
    return Job(variant, replace(run, train=replace(run.train, epochs=epochs, seed=seed)))
