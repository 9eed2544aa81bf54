"""The method on data that needs no download: AFBO+PR and its four complements on scikit-learn's digits.

A Deep-ViT of width 48 and depth 3 on 8 x 8 images, ranks in the paper's proportion to the width. It shows the whole
path, from images to a page; 360 test images settle no question of accuracy.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from oqc import config as configs
from oqc.analysis import overlap
from oqc.config import FFN, Data, Model, Run, Train
from oqc.data import eval_batches, load
from oqc.models import create_model
from oqc.report import Record, append_record
from oqc.train import Trainer
from oqc.train.environment import environment

RESULTS = "runs.jsonl"
EPOCHS = 12
_MODEL = Model(image_size=8, patch_size=2, channels=1, num_classes=10, width=48, depth=3, heads=3)
_TRAIN = Train(epochs=EPOCHS, batch=48, lr=2e-3, warmup=2.0, precision="fp32", mode="eager")
_DATA = Data(name="digits", crop=0, flip=False)
VARIANTS = {
    "AFBO+PR": FFN(),
    "OQC full": FFN(complement="full", rank=12),
    "OQC-LR": FFN(complement="lowrank", rank=10),
    "OQC-static": FFN(complement="static", rank=16),
    "OQC-dynamic": FFN(complement="dynamic", rank=16),
}


def run_demo(
    out: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = EPOCHS,
    workers: int | None = None,
    on_end: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Trains every variant with every seed and appends a record of each to `out`/runs.jsonl, in that order.

    Runs on the CPU, one thread a run, as many runs at once as there are cores (or `workers`): models this small gain
    nothing from more threads.
    """
    load(_DATA)  # verified and packed before the workers ask for it
    runs = [(variant, _run(ffn, seed, epochs)) for variant, ffn in VARIANTS.items() for seed in seeds]
    workers = min(workers or os.cpu_count() or 1, len(runs))
    records = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for record in pool.map(_train, *zip(*runs, strict=True)):
                append_record(out / RESULTS, record)
                on_end(record)
                records.append(record)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return records


def _run(ffn: FFN, seed: int, epochs: int) -> Run:
    train = replace(_TRAIN, epochs=epochs, seed=seed, warmup=min(_TRAIN.warmup, epochs / 2))
    return Run(model=replace(_MODEL, ffn=ffn), data=_DATA, train=train)


def _train(variant: str, run: Run) -> Record:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    data = load(run.data)
    model = create_model(run.model, seed=run.train.seed)
    summary = Trainer(model, data, run, device="cpu").fit()
    batches = eval_batches(data.test, data, batch=512, device=torch.device("cpu"), dtype=torch.float32)
    return {
        "preset": variant,
        "seed": run.train.seed,
        "best": summary.best,
        "final": summary.final,
        "parameters": summary.parameters,
        "images_per_s": summary.images_per_s,
        "per_epoch": [{"epoch": row["epoch"], "test": row["test_accuracy"]} for row in summary.history],
        "mechanism": overlap(model, batches),
        "config": configs.to_dict(run),
        "environment": environment(torch.device("cpu")),
    }
