"""A Deep-ViT trained without the branch, then fine-tuned with it injected as the identity; three seeds.

    python benchmarks/finetune_identity.py --root DATA [--epochs 50] [--more 20] [--seeds 0,1,2]

For each seed: train the plain model; inject and compare the test loss before and after; then fine-tune the injected
model, and as its control the plain one, with the same further epochs, learning rate and batches. Writes
results/integrations/finetune-<data>-<complement>.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import oqc
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
) -> dict[str, object]:
    device = find_device(None)
    run, further = (dataclasses.replace(r, train=dataclasses.replace(r.train, seed=seed)) for r in (run, further))
    base = oqc.create_model(model, seed=seed)
    found: dict[str, object] = {"seed": seed, "base": Trainer(base, data, run, device=device).fit().final}
    weights = {name: value.detach().clone() for name, value in base.state_dict().items()}
    for name in ("plain", "injected"):
        twin = oqc.create_model(model, seed=seed)
        twin.load_state_dict(weights)
        before = test_loss(twin, data, further, device)
        if name == "injected":
            inject(twin, args.complement, rank=args.rank, seed=seed)
            found |= {"loss_before_injection": before, "loss_after_injection": test_loss(twin, data, further, device)}
        summary = Trainer(twin, data, further, device=device).fit()
        found[name] = {"final": summary.final, "best": summary.best, "parameters": summary.parameters}
        found[name]["per_epoch"] = [round(row["test_accuracy"], 2) for row in summary.history]  # type: ignore[index]
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
    parser.add_argument("--out", type=Path, default=Path("results/integrations"))
    args = parser.parse_args()

    source = Data(name=args.data, root=args.root)
    data = load(source)
    model = fitting(args.model, data, args.patch)
    train = Train(epochs=args.epochs, batch=args.batch, precision=args.precision)
    run = Run(model=model, data=source, train=train)
    warmup = min(2.0, args.more / 2)
    further = dataclasses.replace(run, train=dataclasses.replace(train, epochs=args.more, lr=args.lr, warmup=warmup))
    rows = [one_seed(int(seed), model, run, further, data, args) for seed in args.seeds.split(",")]
    gains = [row["injected"]["final"] - row["plain"]["final"] for row in rows]  # type: ignore[index]
    found = {
        "environment": environment(find_device(None)),
        "data": args.data,
        "model": args.model,
        "complement": args.complement,
        "rank": args.rank,
        "epochs": args.epochs,
        "further_epochs": args.more,
        "further_lr": args.lr,
        "seeds": rows,
        "gain_over_control": {"mean": statistics.mean(gains), "each": gains},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"finetune-{args.data}-{args.complement}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"gain_over_control": found["gain_over_control"]}))


if __name__ == "__main__":
    main()
