"""Trains one model from the same seeds through the fused kernels and through the paper's equations.

    python benchmarks/fused_against_reference.py --root DATA [--epochs 20] [--seeds 0,1,2] [--minutes 9]

Both see the same start, batches and schedule, and run as one captured graph; they differ in rounding alone, so their
accuracies must differ by no more than seeds do. Writes results/parity/training-<gpu>.json after each run. A second call
goes on where the first one stopped; none is started that would not end in the given minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import oqc
from oqc import config as configs
from oqc.config import Data, Run, Train
from oqc.data import Dataset, load
from oqc.models import model_config
from oqc.train import Trainer, find_device
from oqc.train.environment import environment

BACKENDS = ("triton", "reference")


def train(run: Run, data: Dataset) -> dict[str, Any]:
    model = oqc.create_model(run.model, seed=run.train.seed, backend=run.train.backend)
    began = time.perf_counter()
    summary = Trainer(model, data, run, device=find_device(None)).fit()
    return {
        "seed": run.train.seed,
        "backend": run.train.backend,
        "final": summary.final,
        "best": summary.best,
        "non_finite": summary.non_finite,
        "images_per_s": summary.images_per_s,
        "compile_and_capture_s": summary.prepare_seconds,
        "seconds": time.perf_counter() - began,
        "per_epoch": [round(row["test_accuracy"], 2) for row in summary.history],
    }


def differences(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Final accuracy, fused less reference, of the seeds that have both."""
    by = {(row["backend"], row["seed"]): row["final"] for row in rows}
    pairs = {
        seed: by["triton", seed] - by["reference", seed] for _, seed in by if all((b, seed) in by for b in BACKENDS)
    }
    if not pairs:
        return {"seeds": 0}
    mean = statistics.mean(pairs.values())
    return {"seeds": len(pairs), "points": pairs, "mean_points": mean, "mean_within_half_a_point": abs(mean) <= 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--root", help="where the data set lies; default: the pack in the cache")
    parser.add_argument("--model", default="deep_vit_afbo_lowrank_r56")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--mode", default="graph")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path, default=Path("results/parity"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device: elsewhere both would run without kernels")

    began = time.perf_counter()
    place = environment(find_device(None))
    source = Data(name=args.data, root=args.root)
    run = Run(model=model_config(args.model), data=source, train=Train(epochs=args.epochs, mode=args.mode))
    run = configs.override(run, args.settings)
    config = configs.to_dict(replace(run, data=replace(run.data, root=None)))
    path = args.out / f"training-{place.get('gpu', 'cpu').lower().replace(' ', '-')}.json"
    rows: list[dict[str, Any]] = []
    if path.exists():
        before = json.loads(path.read_text())
        if before["config"] != config:
            raise SystemExit(f"{path} is of another configuration: move it, or name another --out")
        rows = before["runs"]
    data = load(run.data)
    done, longest = {(row["backend"], row["seed"]) for row in rows}, 0.0
    for seed in map(int, args.seeds.split(",")):
        for backend in BACKENDS:
            if (backend, seed) in done:
                continue
            if time.perf_counter() - began + longest > 60 * args.minutes:
                print(f"not started: seed {seed} by {backend}, for want of time")
                continue
            row = train(replace(run, train=replace(run.train, seed=seed, backend=backend)), data)
            rows.append(row)
            longest = max(longest, row["seconds"])
            found = {"environment": place, "config": config, "difference": differences(rows), "runs": rows}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps({key: value for key, value in row.items() if key != "per_epoch"}), flush=True)
    print(json.dumps(differences(rows)))


if __name__ == "__main__":
    main()
