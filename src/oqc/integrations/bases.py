"""The model below an injection: what of it goes into a saved folder, and how it is built again.

A base is plain data: a library, a name that the library itself knows, and arguments. Nothing is imported or called
because a file says so; names are looked up in the library's own registry and weights are never fetched.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from oqc.config import Model, check_choice, from_dict, to_dict
from oqc.models import DeepViT
from oqc.nn import OQCFFN
from oqc.nn.ffn import mlp_layer

BY_HAND = "save its state_dict() with safetensors, and inject again before loading it"
_FETCHING = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "weights")
_PASSING = ("training", "num_classes", "grad_checkpointing", "gradient_checkpointing", "name_or_path")


@dataclass(frozen=True, kw_only=True)
class Base:
    library: str
    name: str
    arguments: dict[str, Any]
    mlp_layer: dict[str, Any] | None = None  # timm: OQCFFN's options, where the model was built with it


def describe(model: nn.Module, name: str | None = None, arguments: dict[str, Any] | None = None) -> Base:
    """The base of a built model. `name` and `arguments` (added to what is derived) help where it does not tell all."""
    if not isinstance(arguments, (dict, type(None))):
        raise ValueError(f"arguments must be a dict of what the model's constructor was given, got {arguments!r}")
    library = _library(model)
    derived = _DESCRIBE[library](model)
    merged = {**derived.arguments, **(arguments or {})} if name in (None, derived.name) else arguments or {}
    try:
        merged = json.loads(json.dumps(merged))
    except TypeError as error:
        raise ValueError(f"arguments must be numbers, text, lists and tables, got {merged!r}") from error
    return dataclasses.replace(derived, name=name or derived.name, arguments=merged)


def rebuild(base: Base) -> nn.Module:
    """The model of a base, with weights at their start."""
    check_choice("library", base.library, _BUILD)
    for name in _FETCHING:
        if name in base.arguments:
            raise ValueError(f"arguments must not have {name!r}: weights come from the folder alone")
    return _BUILD[base.library](base)


def difference(model: nn.Module, other: nn.Module) -> str | None:
    """The first thing that tells two models apart: modules, shapes, and plain settings such as numbers of heads."""
    own, others = dict(model.named_modules()), dict(other.named_modules())
    for path in sorted(own.keys() ^ others.keys()):
        return f"{path!r} is in {'the model' if path in own else 'the rebuilt model'} only"
    for path, module in own.items():
        twin = others[path]
        if type(module) is not type(twin) and path:
            return f"{path!r} is a {type(module).__name__}, rebuilt a {type(twin).__name__}"
        mine, theirs = _settings(module), _settings(twin)
        for name in mine:
            if mine[name] != theirs.get(name):
                return f"{f'{path}.{name}'.lstrip('.')} is {mine[name]!r}, rebuilt {theirs.get(name)!r}"
    return None


def _settings(module: nn.Module) -> dict[str, Any]:
    plain = {
        name: list(value) if isinstance(value, (tuple, list)) else value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _PASSING and _is_plain(value)
    }
    kept = {name: v for name, v in module._buffers.items() if name not in module._non_persistent_buffers_set}
    weights = [*module._parameters.items(), *kept.items()]
    return plain | {name: list(value.shape) for name, value in weights if value is not None}


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _library(model: nn.Module) -> str:
    if isinstance(model, DeepViT):
        return "oqc"
    for cls in type(model).__mro__:
        library = cls.__module__.split(".")[0]
        # An injected network has a class of ours, and peft's models have one of transformers' that is no model.
        if library in _DESCRIBE and library != "oqc" and issubclass(cls, nn.Module):
            return library
    raise ValueError(f"{type(model).__name__} is not a model of {', '.join(_DESCRIBE)}; {BY_HAND}")


def _describe_oqc(model: nn.Module) -> Base:
    assert isinstance(model, DeepViT)
    classes = model.head.out_features if isinstance(model.head, nn.Linear) else 0
    arguments: dict[str, Any] = {"config": to_dict(dataclasses.replace(model.config, num_classes=classes))}
    name = "DeepViT"
    if hasattr(model, "global_pool"):
        name = "TimmDeepViT"
        arguments["global_pool"] = model.global_pool
    return Base(library="oqc", name=name, arguments=arguments)


def _build_oqc(base: Base) -> nn.Module:
    check_choice("name", base.name, ("DeepViT", "TimmDeepViT"))
    config = from_dict(Model, base.arguments["config"])
    if base.name == "DeepViT":
        return DeepViT(config, seed=0)
    from oqc.integrations.timm import TimmDeepViT

    return TimmDeepViT(config, seed=0, global_pool=base.arguments["global_pool"])


def _describe_timm(model: nn.Module) -> Base:
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    name = config.get("architecture")
    if not name:
        raise ValueError(f"{type(model).__name__} was not made by timm.create_model; pass name= and arguments=")
    derived: dict[str, Any] = {"in_chans": getattr(model, "in_chans", None)}
    derived["global_pool"] = getattr(model, "global_pool", None)
    derived["img_size"] = getattr(getattr(model, "patch_embed", None), "img_size", None)
    paths = [part.drop_prob for part in model.modules() if type(part).__name__ == "DropPath"]
    derived["drop_path_rate"] = max(paths, default=None)  # type: ignore[type-var]
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None  # type: ignore[operator]
    classifier = classifier[0] if isinstance(classifier, tuple) else classifier  # distilled models have two
    derived["num_classes"] = getattr(classifier, "out_features", getattr(model, "num_classes", None))
    taken = {name for cls in type(model).__mro__ for name in inspect.signature(cls.__init__).parameters}  # type: ignore[misc]
    arguments = {key: v for key, v in derived.items() if v is not None and _is_plain(v) and key in taken}
    if type(model).__module__ == "timm.models._features":
        arguments |= {"features_only": True, "out_indices": list(model.feature_info.out_indices)}  # type: ignore[arg-type, union-attr]
        kind = {"FeatureDictNet": "dict", "FeatureHookNet": "hook", "FeatureGraphNet": "fx"}.get(type(model).__name__)
        arguments |= {"feature_cls": kind} if kind else {}
    options = next((part.options for part in model.modules() if isinstance(part, OQCFFN)), None)
    return Base(library="timm", name=name, arguments=arguments, mlp_layer=options)


def _build_timm(base: Base) -> nn.Module:
    import timm

    if not timm.is_model(base.name):
        raise ValueError(f"timm has no model {base.name!r}")
    extra: dict[str, Any] = {} if base.mlp_layer is None else {"mlp_layer": mlp_layer(**base.mlp_layer)}
    return timm.create_model(base.name, **base.arguments, **extra)


def _describe_torchvision(model: Any) -> Base:
    name = type(model).__name__
    if name == "VisionTransformer":
        arguments = {
            key: getattr(model, key)
            for key in ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "attention_dropout")
        }
        arguments |= {"num_layers": len(model.encoder.layers), "num_heads": model.encoder.layers[0].num_heads}
        arguments |= {"representation_size": model.representation_size}
        arguments["num_classes"] = [part for part in model.heads.modules() if isinstance(part, nn.Linear)][
            -1
        ].out_features
    elif name == "SwinTransformer":
        stages, patch = list(model.features[1::2]), model.features[0][0]
        first, last = stages[0][0], stages[-1][-1]
        arguments = {
            "patch_size": patch.kernel_size,
            "embed_dim": patch.out_channels,
            "depths": [len(stage) for stage in stages],
            "num_heads": [stage[0].attn.num_heads for stage in stages],
            "window_size": first.attn.window_size,
            "mlp_ratio": first.mlp[0].out_features / patch.out_channels,
            "dropout": first.mlp[2].p,
            "attention_dropout": first.attn.attention_dropout,
            "stochastic_depth_prob": last.stochastic_depth.p,
            "num_classes": model.head.out_features,
        }
        name = "SwinTransformerV2" if hasattr(first.attn, "cpb_mlp") else name
    else:
        arguments = {}
    return Base(library="torchvision", name=name, arguments=arguments)


def _build_torchvision(base: Base) -> nn.Module:
    from torchvision import models
    from torchvision.models import swin_transformer as swin

    if base.name == "VisionTransformer":
        return models.VisionTransformer(**base.arguments)
    if base.name == "SwinTransformer":
        return models.SwinTransformer(**base.arguments)
    if base.name == "SwinTransformerV2":
        blocks = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
        return models.SwinTransformer(**base.arguments, **blocks)
    if base.name not in models.list_models():
        raise ValueError(
            f"torchvision has no model {base.name!r}; pass name= as torchvision.models.list_models() has it"
        )
    return models.get_model(base.name, weights=None, **base.arguments)


def _describe_transformers(model: Any) -> Base:
    return Base(library="transformers", name=type(model).__name__, arguments=_without_oqc(model.config.to_dict()))


def _without_oqc(values: dict[str, Any]) -> dict[str, Any]:
    """The injection is kept beside the config, not in it."""
    return {k: _without_oqc(v) if isinstance(v, dict) else v for k, v in values.items() if k != "oqc"}


def _build_transformers(base: Base) -> nn.Module:
    from oqc.integrations.transformers import architecture

    cls = architecture(base.name)
    return cls(cls.config_class.from_dict(base.arguments))


_DESCRIBE: dict[str, Callable[[Any], Base]] = {
    "oqc": _describe_oqc,
    "timm": _describe_timm,
    "torchvision": _describe_torchvision,
    "transformers": _describe_transformers,
}
_BUILD: dict[str, Callable[[Base], nn.Module]] = {
    "oqc": _build_oqc,
    "timm": _build_timm,
    "torchvision": _build_torchvision,
    "transformers": _build_transformers,
}
