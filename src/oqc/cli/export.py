"""`oqc export`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from oqc import config as configs
from oqc.cli.train import Folder, Which, load_model
from oqc.files import check_folder, write_whole
from oqc.integrations.export import to_onnx, to_torch_export
from oqc.integrations.folding import fold as fold_model
from oqc.integrations.saving import save
from oqc.train import RunFolder
from oqc.train.folder import EXPORTS, INPUT, is_export


def export(
    run: Folder,
    to: Annotated[str, typer.Option(help=", ".join(EXPORTS))] = "onnx",
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: export in the run's folder.")] = None,
    checkpoint: Which = "last",
    fold: Annotated[bool, typer.Option("--fold", help="Merge what inference need not compute each time.")] = False,
) -> None:
    """Write a run's model for use elsewhere, with what its input must be in input.json."""
    configs.check_choice("--to", to, EXPORTS)
    folder = RunFolder(run)
    config, data = folder.config(), folder.data()
    target = out or folder.exported
    path = target / EXPORTS[to]
    check_folder("--out", target)
    for one in (path, target / INPUT):
        if one.exists() and not is_export(target):
            raise ValueError(f"--out {target} has a {one.name} that oqc export did not write; name another folder")
    plain = dataclasses.replace(config.train, backend="auto", precision="fp32")  # whatever it was trained with
    model, step = load_model(run, dataclasses.replace(config, train=plain), checkpoint, torch.device("cpu"))
    if fold:
        fold_model(model)
    target.mkdir(parents=True, exist_ok=True)
    shape = (config.model.channels, config.model.image_size, config.model.image_size)
    wanted = {"shape": shape, "range": [0, 1], **{name: data[name] for name in ("mean", "std", "classes")}}
    write_whole(target / INPUT, json.dumps(wanted, indent=1) + "\n")  # first: it is what an export is known by
    if to == "safetensors":
        save(model, target)
    elif to == "onnx":
        to_onnx(model, path, torch.zeros(1, *shape))
    else:
        to_torch_export(model, path, torch.zeros(1, *shape))
    which = f"{checkpoint} weights, step {step}{', folded' if fold else ''}"
    typer.echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB, {which})")
