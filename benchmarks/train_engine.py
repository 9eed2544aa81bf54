"""Measures the training engine on CIFAR-100 and writes results/engine/<gpu>-<model>.json.

    python benchmarks/train_engine.py --root DATA --out results/engine [--epochs 50]

- AFBO+PR, batch 512: end-to-end training throughput (augmentation, schedule, logging; evaluation apart) against the
  bare replay of the captured step in the same process, and the accuracy of a whole run;
- three seeds at once at batch 128 against one after the other.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

import oqc
from oqc.config import Data, Run, Train
from oqc.data import load
from oqc.models.registry import MODELS
from oqc.train import Trainer, replay_rate
from oqc.train.environment import environment


def trainer(run: Run, data, **options) -> Trainer:
    model = oqc.create_model(run.model, seed=run.train.seed, backend=run.train.backend)
    return Trainer(model, data, run, device="cuda", **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="where CIFAR-100 lies; default: the pack in the cache")
    parser.add_argument("--out", type=Path, default=Path("results/engine"))
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--model", default="deep_vit_afbo")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--skip-seeds", action="store_true")
    args = parser.parse_args()

    device = torch.device("cuda")
    run = Run(
        model=MODELS[args.model],
        data=Data(name="cifar100", root=args.root),
        train=Train(epochs=args.epochs, mode="graph", backend=args.backend),
    )
    data = load(run.data)
    found: dict[str, object] = {"environment": environment(device), "model": args.model, "seed": 0}

    one = trainer(run, data)
    bare = replay_rate([one], 60)
    summary = one.fit()
    found |= {
        "batch": run.train.batch,
        "replay_images_per_s": bare,
        "train_images_per_s": summary.images_per_s,
        "end_to_end_share": summary.images_per_s / bare,
        "compile_and_capture_s": summary.prepare_seconds,
        "seconds": summary.seconds,
        "epochs": summary.epochs,
        "best": summary.best,
        "final": summary.final,
        "non_finite": summary.non_finite,
        "per_epoch": [round(row["test_accuracy"], 2) for row in summary.history],
    }
    print(json.dumps({k: v for k, v in found.items() if k not in ("environment", "per_epoch")}), flush=True)
    write(args, found)
    del one

    if not args.skip_seeds:
        small = [replace(run, train=replace(run.train, batch=128, seed=seed)) for seed in range(3)]
        three = [trainer(r, data) for r in small]
        began = time.perf_counter()
        rates = [(replay_rate(three[:1], 200), replay_rate(three, 200)) for _ in range(3)]
        found["seeds_at_once"] = {
            "batch": 128,
            "one_images_per_s": sorted(r[0] for r in rates)[1],
            "three_images_per_s": sorted(r[1] for r in rates)[1],
            "gain": sorted(r[1] / r[0] for r in rates)[1],
            "seconds": time.perf_counter() - began,
        }
        print(json.dumps(found["seeds_at_once"]), flush=True)
        write(args, found)


def write(args: argparse.Namespace, found: dict[str, object]) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    (args.out / f"{name}-{args.model}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
