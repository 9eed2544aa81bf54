"""`save` and `load`: a folder with the tensors in safetensors and everything else in one JSON file, never code.

`oqc.json` is written before `model.safetensors`, each to a temporary file that is renamed. The JSON holds the base
model (oqc.integrations.bases), the injection, which tensors are one and the same, and the digest of the tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from oqc.files import as_path, check_folder, write_whole
from oqc.integrations import bases
from oqc.integrations.bases import Base
from oqc.integrations.finding import quantised
from oqc.integrations.folding import fold
from oqc.integrations.injection import is_folded, restore, specification
from oqc.integrations.wrappers import check_model, uncompiled

FORMAT = 1
TENSORS, RECORD = "model.safetensors", "oqc.json"


def save(
    model: nn.Module, path: str | Path, *, name: str | None = None, arguments: dict[str, Any] | None = None
) -> None:
    """Writes a model, with its injection if it has one, to the folder `path`, from which `load` builds it again.

    Works for Deep-ViT and the models of timm, torchvision and transformers. The model is rebuilt without weights and
    compared first; where its own attributes do not tell how it was made, `arguments` are what its constructor was
    given (timm: the keywords of `create_model`) and `name` is its name in its library.
    """
    check_model(model)
    folder = as_path("path", path)
    if not str(path):
        raise ValueError("path must name a folder, got ''")
    check_folder("path", folder)
    if (folder / TENSORS).exists() and not (folder / RECORD).exists():
        raise ValueError(f"{folder} has a {TENSORS} that oqc.save did not write; name another folder")
    model = _unwrapped(model)
    sharded = next((name for name, p in model.named_parameters() if hasattr(p, "full_tensor")), None)
    if sharded is not None:
        raise ValueError(
            f"{sharded} is sharded; gather the weights first (torch.distributed.checkpoint.state_dict,"
            " full_state_dict=True) into an unsharded copy of the model, and save that"
        )
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ValueError(f"{meta} is on the meta device: there are no weights to save")
    layer = quantised(model)
    if layer is not None:
        raise ValueError(
            f"{layer} is quantised: save the model before that, or its state_dict() with torch.save, which"
            " load_state_dict(..., assign=True) brings back"
        )
    base = bases.describe(model, name, arguments)
    record = {
        "format": FORMAT,
        "base": dataclasses.asdict(base),
        "injection": specification(model),
        "folded": is_folded(model),
    }
    try:
        other = _build(record, on_meta=True)
    except ValueError:
        raise
    except Exception as error:  # whatever a library says of bad arguments
        raise ValueError(
            f"arguments must be what {base.library}'s {base.name} can be built with, got {arguments!r}:"
            f" {' '.join(str(error).split())}"
        ) from error
    unlike = bases.difference(model, other)
    if unlike is not None:
        raise ValueError(
            f"{unlike}: {base.library}'s {base.name}, built again, is not this model; pass arguments= with what its"
            f" constructor was given, or, where it was changed since, {bases.BY_HAND}"
        )
    tensors, tied = _distinct(model.state_dict())
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    record |= {"tied": tied, "sha256": hashlib.sha256(data).hexdigest()}
    write_whole(folder / RECORD, json.dumps(record, indent=1) + "\n")
    write_whole(folder / TENSORS, data)


def load(path: str | Path, device: torch.device | str = "cpu") -> nn.Module:
    """The model that `save` wrote to the folder `path`, in evaluation mode.

    Also takes a folder that transformers' own `save_pretrained` made of an injected model.
    """
    folder = as_path("path", path)
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError) as error:  # no device, or one that is not here
        said = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"device must be one that PyTorch has here, got {device!r}: {said}") from None
    if not (folder / RECORD).exists():
        config = _config(folder / "config.json")
        if {"model", "data", "train"} <= config.keys():
            raise ValueError(
                f"{folder} is a run of oqc train; write its model to a folder for oqc.load with:"
                f" oqc export {shlex.quote(str(folder))} --to safetensors --out FOLDER"
            )
        if not config.keys().isdisjoint(("architectures", "model_type")):
            from oqc.integrations.transformers import from_pretrained

            return from_pretrained(folder).to(device)
        raise ValueError(f"{folder} is not a saved model: it has no {RECORD}")
    record = _read(folder / RECORD)
    try:
        data = (folder / TENSORS).read_bytes()
    except OSError as error:
        raise ValueError(f"{folder / TENSORS} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise ValueError(f"{folder / TENSORS} is damaged: its digest is not the one in {RECORD}")
    tensors = safetensors.torch.load(data)
    tensors |= {name: tensors[kept] for name, kept in _tied(record, tensors, folder / RECORD).items()}
    try:
        model = _build(record, on_meta=False)
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:  # whatever a library says of bad arguments
        raise ValueError(f"{folder / RECORD} tells of no model that can be built: {error}") from error
    _fill(model, tensors, folder / TENSORS)
    if record["folded"]:
        fold(model)
    return model.eval().to(device)


def _tied(record: dict[str, Any], tensors: dict[str, Tensor], path: Path) -> dict[str, str]:
    tied = record["tied"]
    if not isinstance(tied, dict) or not all(isinstance(one, str) and one in tensors for one in tied.values()):
        raise ValueError(f"{path} is damaged: tied must name tensors of {TENSORS}")
    return tied


def _build(record: dict[str, Any], on_meta: bool) -> nn.Module:
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = bases.rebuild(Base(**record["base"]))
    if record["injection"] is not None:
        restore(model, record["injection"])
    return model


def _fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Loads every tensor, in its own precision; the branch's may not be missing here."""
    own = model.state_dict(keep_vars=True)
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or unknown:
        fault = f"has no {missing[0]!r}" if missing else f"has {unknown[0]!r}, which the model does not"
        raise ValueError(f"{path} does not fit the model in {RECORD}: it {fault}")
    for name, value in own.items():
        if value.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)}, where the model has {list(value.shape)}"
            raise ValueError(f"{path} does not fit the model in {RECORD}: {name!r} is {shapes}")
        value.data = value.data.to(tensors[name].dtype)
    model.load_state_dict(tensors)


def _distinct(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors without repeats, and for each repeat the name under which it is kept."""
    kept: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and key in kept:
            tied[name] = kept[key]
        else:
            kept[key] = name
            tensors[name] = value.detach().cpu().contiguous().clone()
    return tensors, tied


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's wrapper, and inside those that hold it as their one child `module`: parallel
    ones, and averages of its weights."""
    model = uncompiled(model)
    while [name for name, _ in model.named_children()] == ["module"]:
        model = uncompiled(model.module)  # type: ignore[arg-type]
    return model


def _config(path: Path) -> dict[str, Any]:
    """A config.json, of a run or of a transformers model; empty where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path} is damaged: it is not JSON") from None
    fields = {"format", "base", "injection", "folded", "tied", "sha256"}
    if not isinstance(record, dict) or not fields <= record.keys():
        raise ValueError(f"{path} is damaged: it is not the record of a saved model")
    if record["format"] != FORMAT:
        raise ValueError(f"{path} has format {record['format']!r}; this version of oqc reads format {FORMAT}")
    base, known = record["base"], {field.name for field in dataclasses.fields(Base)}
    if not isinstance(base, dict) or not {"library", "name", "arguments"} <= base.keys() <= known:
        raise ValueError(f"{path} is damaged: its base model needs library, name and arguments")
    return record
