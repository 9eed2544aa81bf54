"""`oqc export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from oqc import config as configs
from oqc.integrations.export import to_onnx, to_torch_export
from oqc.integrations.folding import fold as fold_model
from oqc.integrations.saving import TENSORS, save
from oqc.models import create_model
from oqc.train import RunFolder, load_weights

FILES = {"onnx": "model.onnx", "torch-export": "model.pt2", "safetensors": TENSORS}


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    to: Annotated[str, typer.Option(help=", ".join(FILES))] = "onnx",
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: export in the run's folder.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Weights to use: last or best.")] = "last",
    fold: Annotated[bool, typer.Option("--fold", help="Merge what inference need not compute each time.")] = False,
) -> None:
    """Write a run's model for use elsewhere, with what its input must be in input.json."""
    configs.check_choice("--to", to, FILES)
    folder = RunFolder(run)
    config = folder.config()
    model = create_model(config.model, seed=config.train.seed)
    model.load_state_dict(load_weights(run, checkpoint))
    model.eval()
    if fold:
        fold_model(model)
    target = out or folder.path / "export"
    target.mkdir(parents=True, exist_ok=True)
    shape = (config.model.channels, config.model.image_size, config.model.image_size)
    path = target / FILES[to]
    if to == "safetensors":
        save(model, target)
    elif to == "onnx":
        to_onnx(model, path, torch.zeros(1, *shape))
    else:
        to_torch_export(model, path, torch.zeros(1, *shape))
    data = folder.read("environment.json").get("data", {})
    wanted = {"shape": shape, "range": [0, 1], "mean": data.get("mean"), "std": data.get("std")}
    (target / "input.json").write_text(json.dumps({**wanted, "classes": data.get("classes")}, indent=1) + "\n")
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB, {checkpoint} weights{', folded' if fold else ''})")
