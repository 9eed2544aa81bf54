"""The method on data that needs no download: AFBO+PR and its four complements on scikit-learn's digits.

A Deep-ViT of width 64 and depth 4 on 8 x 8 images, ranks in the paper's proportion to the width. It shows the whole
path, from images to a page; 360 test images settle no question of accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from oqc import config as configs
from oqc.analysis import overlap
from oqc.config import FFN, Data, Model, Run, Train
from oqc.data import Dataset, eval_batches, load
from oqc.models import create_model
from oqc.report import Record, append_record
from oqc.train import Progress, Trainer, environment

RESULTS = "runs.jsonl"
EPOCHS = 20
_MODEL = Model(image_size=8, patch_size=2, channels=1, num_classes=10, width=64, depth=4, heads=4)
_TRAIN = Train(epochs=EPOCHS, batch=64, lr=2e-3, warmup=2.0, precision="fp32", mode="eager")
_DATA = Data(name="digits", crop=1, flip=False)
VARIANTS = {
    "AFBO+PR": FFN(),
    "OQC full": FFN(complement="full", rank=16),
    "OQC-LR": FFN(complement="lowrank", rank=14),
    "OQC-static": FFN(complement="static", rank=21),
    "OQC-dynamic": FFN(complement="dynamic", rank=21),
}


def run_demo(
    out: Path,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = EPOCHS,
    on_start: Callable[[str, int], Progress | None] = lambda variant, seed: None,
    on_end: Callable[[Record], None] = lambda record: None,
) -> list[Record]:
    """Trains every variant with every seed on the CPU and appends a record of each to `out`/runs.jsonl."""
    data = load(_DATA)
    records = []
    for variant, ffn in VARIANTS.items():
        for seed in seeds:
            warmup = min(_TRAIN.warmup, epochs / 2)
            train = replace(_TRAIN, epochs=epochs, seed=seed, warmup=warmup)
            run = Run(model=replace(_MODEL, ffn=ffn), data=_DATA, train=train)
            record = _train(variant, run, data, on_start(variant, seed))
            append_record(out / RESULTS, record)
            on_end(record)
            records.append(record)
    return records


def _train(variant: str, run: Run, data: Dataset, progress: Progress | None) -> Record:
    model = create_model(run.model, seed=run.train.seed)
    trainer = Trainer(model, data, run, device="cpu", progress=progress)
    summary = trainer.fit()
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
