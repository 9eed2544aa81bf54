"""Models by name: `deep_vit_<host>[_<complement>_r<rank>][_64px]`, and ViT-Tiny for the readout pilot."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

from oqc.config import FFN, HOSTS, Model, nearest
from oqc.models.deep_vit import DeepViT

RANKS = {"full": 64, "lowrank": 56, "static": 83, "dynamic": 83, "shared": 56, "unprojected": 56, "ungated": 56}
MAIN = ("full", "lowrank", "static", "dynamic")
TINY_IMAGENET: dict[str, Any] = {"image_size": 64, "patch_size": 8, "num_classes": 200}


def _models() -> dict[str, Model]:
    models: dict[str, Model] = {}
    hosts: dict[str, dict[str, Any]] = {"afbo": {"host": "afbo"}, "afbo_grouped": {"host": "afbo", "groups": 4}}
    hosts |= {name: {"host": name} for name in HOSTS if name != "afbo"}
    for host, options in hosts.items():
        complements = tuple(RANKS) if host == "afbo" else MAIN
        models[f"deep_vit_{host}"] = Model(ffn=FFN(**options))
        for name in complements:
            ffn = FFN(**options, complement=name, rank=RANKS[name])
            models[f"deep_vit_{host}_{name}_r{RANKS[name]}"] = Model(ffn=ffn)
    for name in ["", *(f"_{name}_r{RANKS[name]}" for name in MAIN)]:
        models[f"deep_vit_afbo{name}_64px"] = dataclasses.replace(models[f"deep_vit_afbo{name}"], **TINY_IMAGENET)
    tiny: dict[str, Any] = {"width": 192, "depth": 12, "heads": 3, "ffn": FFN(host="mlp")}
    models["vit_tiny"] = Model(**tiny, readout=False)
    models["vit_tiny_pr"] = Model(**tiny)
    return models


MODELS = _models()
PAPER = [f"deep_vit_afbo{n}{s}" for s in ("", "_64px") for n in ["", *(f"_{m}_r{RANKS[m]}" for m in MAIN)]]


def list_models(pattern: str = "*") -> list[str]:
    """Names that `create_model` knows; `pattern` may have wildcards: `list_models("*_lowrank_*")`."""
    return fnmatch.filter(MODELS, pattern)


def model_config(name: str, **overrides: Any) -> Model:
    """The config of a named model with fields of `Model` or of its `FFN` replaced."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}{nearest(name, MODELS)} (oqc models lists all)")
    return _replace(MODELS[name], overrides)


def _replace(config: Model, overrides: dict[str, Any]) -> Model:
    of_model = {f.name for f in dataclasses.fields(Model)}
    of_ffn = {f.name for f in dataclasses.fields(FFN)}
    for name in overrides:
        if name not in of_model | of_ffn:
            raise ValueError(f"unknown argument {name!r}{nearest(name, of_model | of_ffn)}")
    inner = {name: value for name, value in overrides.items() if name in of_ffn}
    outer = {name: value for name, value in overrides.items() if name in of_model}
    ffn = dataclasses.replace(outer.pop("ffn", config.ffn), **inner)
    return dataclasses.replace(config, ffn=ffn, **outer)


def create_model(
    model: str | Model,
    *,
    seed: int | None = None,
    backend: str = "auto",
    device: Any = None,
    dtype: Any = None,
    **overrides: Any,
) -> DeepViT:
    """A model by name or from a config; keyword arguments replace fields of the config or of its FFN.

    >>> oqc.create_model("deep_vit_afbo_lowrank_r56", num_classes=10, depth=4, rank=32)
    """
    config = model_config(model, **overrides) if isinstance(model, str) else _replace(model, overrides)
    if overrides.get("rank") is not None and config.ffn.complement == "none":
        raise ValueError(f"rank {overrides['rank']} is that of a complement, and this model has none: give complement=")
    return DeepViT(config, seed=seed, backend=backend, device=device, dtype=dtype)
