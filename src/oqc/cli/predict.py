"""`oqc predict`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from PIL import Image

from oqc.cli.train import AsJson, Device, Folder, Which, load_model
from oqc.config import Model
from oqc.data.images import eight_bit, fit
from oqc.train import RunFolder, find_device
from oqc.train.numerics import DTYPES, autocast

COLOURS = {1: "L", 3: "RGB", 4: "RGBA"}  # by the number of channels


def predict(
    run: Folder,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.")],
    checkpoint: Which = "last",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """The five most likely classes of images, which are resized to the model's size."""
    folder, own = RunFolder(run), find_device(device)
    config, data = folder.config(), folder.data()
    if config.model.channels not in COLOURS:
        raise ValueError(f"the run's model has {config.model.channels} channels, an image file has 1, 3 or 4")
    read: dict[Path, torch.Tensor] = {}
    faults: dict[Path, str] = {}
    found: dict[Path, tuple[list[float], list[int]]] = {}
    for path in images:
        try:
            read[path] = read_image(path, config.model)
        except ValueError as error:
            faults[path] = str(error)
    model, _ = load_model(run, config, checkpoint, own)
    if read:
        dtype = DTYPES[config.train.precision]
        pixels = torch.stack(list(read.values())).to(own, dtype)
        mean, std = (torch.tensor(data[name], device=own, dtype=dtype)[:, None, None] for name in ("mean", "std"))
        with torch.no_grad(), autocast(own, config.train.precision):
            logits = model((pixels / 255 - mean) / std)
        chances, order = logits.double().softmax(1).topk(min(5, logits.shape[1]))
        found = dict(zip(read, zip(chances.tolist(), order.tolist(), strict=True), strict=True))
    for path in images:
        if path in faults:
            if as_json:
                typer.echo(json.dumps({"image": str(path), "error": faults[path]}))
            continue
        top = [{"class": data["classes"][k], "probability": p} for p, k in zip(*found[path], strict=True)]
        if as_json:
            typer.echo(json.dumps({"image": str(path), "top": top}))
        else:
            typer.echo("\n".join([str(path), *(f"  {100 * one['probability']:6.2f}%  {one['class']}" for one in top)]))
    if faults:
        raise ValueError("; ".join(faults.values()))


def read_image(path: Path, model: Model) -> torch.Tensor:
    """uint8 [C, H, W] of the model's size: the centre square, as data sets are packed."""
    try:
        with Image.open(path) as image:
            pixels = np.array(fit(eight_bit(image).convert(COLOURS[model.channels]), model.image_size))
    except Exception as error:  # on damaged files the decoders fail in many ways
        raise ValueError(f"{path} cannot be read as an image: {error}") from None
    return torch.from_numpy(pixels).reshape(model.image_size, model.image_size, -1).permute(2, 0, 1)
