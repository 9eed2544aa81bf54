"""A Deep-ViT trained without the branch, then fine-tuned with it injected as the identity; three seeds.

    python benchmarks/finetune_identity.py --root DATA [--epochs 50] [--more 20] [--seeds 0,1,2] [--minutes 9]

For each seed: train the plain model; inject and compare the test loss before and after; then fine-tune the injected
model, and as its control the plain one, with the same further epochs, learning rate and batches. Writes
results/integrations/finetune-<data>-<complement>.json after each seed. A second call goes on with the seeds that are
missing; none is started that would not end in the given minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import oqc
from oqc import config as configs
from oqc.config import Data, Model, Run, Train
from oqc.data import Dataset, eval_batches, load
from oqc.integrations import inject
from oqc.models import model_config
from oqc.train import Trainer, find_device
from oqc.train.environment import environment
from oqc.train.numerics import DTYPES, autocast


@torch.no_grad()
def test_loss(model: nn.Module, data: Dataset, run: Run, device: torch.device) -> float:
    dtype = DTYPES[run.train.precision]
    model = model.to(device, dtype).eval()
    total = 0.0
    for x, labels in eval_batches(data.test, data, batch=run.train.batch, device=device, dtype=dtype):
        with autocast(device, run.train.precision):
            logits = model(x)
        total += F.cross_entropy(logits.float(), labels, reduction="sum").item()
    return total / len(data.test)


def fitting(name: str, data: Dataset, patch: int | None) -> Model:
    """The named model with the ends that the data set needs."""
    _, channels, size, _ = data.train.images.shape
    config = model_config(name, image_size=size, channels=channels, num_classes=len(data.classes))
    return config if patch is None else dataclasses.replace(config, patch_size=patch)


def one_seed(
    seed: int, model: Model, run: Run, further: Run, data: Dataset, args: argparse.Namespace
) -> dict[str, Any]:
    device, began = find_device(None), time.perf_counter()
    run, further = (dataclasses.replace(r, train=dataclasses.replace(r.train, seed=seed)) for r in (run, further))
    base = oqc.create_model(model, seed=seed)
    found: dict[str, Any] = {"seed": seed, "base": Trainer(base, data, run, device=device).fit().final}
    weights = {name: value.detach().clone() for name, value in base.state_dict().items()}
    for name in ("plain", "injected"):
        twin = oqc.create_model(model, seed=seed)
        twin.load_state_dict(weights)
        if name == "injected":
            found["loss_before_injection"] = test_loss(twin, data, further, device)
            inject(twin, args.complement, rank=args.rank, seed=seed)
            found["loss_after_injection"] = test_loss(twin, data, further, device)
        summary = Trainer(twin, data, further, device=device).fit()
        found[name] = {
            "final": summary.final,
            "best": summary.best,
            "parameters": summary.parameters,
            "per_epoch": [round(row["test_accuracy"], 2) for row in summary.history],
        }
    found["seconds"] = time.perf_counter() - began
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--root", help="where the data set lies; default: the pack in the cache")
    parser.add_argument("--model", default="deep_vit_afbo")
    parser.add_argument("--patch", type=int)
    parser.add_argument("--complement", default="lowrank")
    parser.add_argument("--rank", type=int, default=56)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--more", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-4, help="of the fine-tuning, at its peak")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("results/integrations"))
    args = parser.parse_args()

    began = time.perf_counter()
    source = Data(name=args.data, root=args.root)
    data = load(source)
    model = fitting(args.model, data, args.patch)
    train = Train(epochs=args.epochs, batch=args.batch, precision=args.precision)
    run = Run(model=model, data=source, train=train)
    warmup = min(2.0, args.more / 2)
    further = dataclasses.replace(run, train=dataclasses.replace(train, epochs=args.more, lr=args.lr, warmup=warmup))
    settings = {
        "data": args.data,
        "model": configs.to_dict(model),
        "complement": args.complement,
        "rank": args.rank,
        "train": configs.to_dict(train),
        "further_train": configs.to_dict(further.train),
    }
    path = args.out / f"finetune-{Path(args.data).stem}-{args.complement}.json"
    rows: list[dict[str, Any]] = []
    if path.exists():
        before = json.loads(path.read_text())
        if before["settings"] != settings:
            raise SystemExit(f"{path} is of other settings: move it, or name another --out")
        rows = before["seeds"]
    place = environment(find_device(None))
    done, longest = {row["seed"] for row in rows}, 0.0
    for seed in map(int, args.seeds.split(",")):
        if seed in done:
            continue
        if time.perf_counter() - began + longest > 60 * args.minutes:
            print(f"not started: seed {seed}, for want of time")
            continue
        rows.append(one_seed(seed, model, run, further, data, args))
        longest = max(longest, rows[-1]["seconds"])
        gains = [row["injected"]["final"] - row["plain"]["final"] for row in rows]
        gain = {"mean": statistics.mean(gains), "each": gains}
        found = {"environment": place, "settings": settings, "gain_over_control": gain, "seeds": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps({"gain_over_control": gain}), flush=True)


if __name__ == "__main__":
    main()
