"""Injected transformers models through transformers' own saving and loading.

`inject` puts an `oqc` entry into the model's config and the branch into its state dict, so `save_pretrained`,
`push_to_hub` and Trainer keep both. transformers' own `from_pretrained` builds the plain model and warns that the
branch's weights were not used; `from_pretrained` here builds the injected one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import nn

from oqc.integrations.injection import restore, tells

# Options that say where the files of a model are, for its config as for its weights.
PLACE = ("revision", "token", "subfolder", "cache_dir", "local_files_only", "force_download", "proxies")


def architecture(name: str) -> Any:
    """A model class by its name in transformers."""
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ValueError(f"transformers {transformers.__version__} has no model class {name!r}")
    return cls


def from_pretrained(path: str | Path, **options: Any) -> Any:
    """The injected model of a folder (or of a name on the hub) that `save_pretrained` or `push_to_hub` wrote.

    `options` are transformers' own: `dtype`, `device_map`, `revision`, `num_labels` or another field of the config, ...
    """
    config, with_info = options.pop("config", None), options.pop("output_loading_info", False)
    if not isinstance(config, transformers.PretrainedConfig):
        dtypes = {name: options.pop(name) for name in ("dtype", "torch_dtype") if name in options}  # of the weights
        where = {name: options[name] for name in PLACE if name in options}
        source = path if config is None else config
        config, rest = transformers.AutoConfig.from_pretrained(source, return_unused_kwargs=True, **options)
        options = rest | where | dtypes  # what is not there any more was a field of the config
    cls = architecture((config.architectures or [""])[0])
    if not any(tells(part) for part in _configs(config)):
        raise ValueError(
            f"{path} has no injected model: its config has no oqc entry; use {cls.__name__}.from_pretrained"
        )

    def start(self: nn.Module, config: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        _restore_all(self)

    loader: Any = type(cls.__name__, (cls,), {"__init__": start, "__module__": cls.__module__})
    model, found = loader.from_pretrained(path, config=config, **options, output_loading_info=True)
    missing = sorted(name for name in found["missing_keys"] if ".complement." in name)
    if missing:
        raise ValueError(
            f"{path} has no weights for {missing[0]}, which its config says were injected; of a model that was loaded"
            " without them and saved again, or only shares an injected one's config object, take the oqc entry out of"
            " config.json"
        )
    model.__class__ = cls
    return (model, found) if with_info else model


def _restore_all(model: nn.Module) -> None:
    """A config may be held by several modules, one inside the other: the paths are of the one that was injected. A part
    of the model may have a copy of its config, which says nothing new."""
    holders: dict[int, list[Any]] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if tells(config):
            holders.setdefault(id(config), []).append(module)
    restored: list[Any] = []
    for modules in holders.values():
        injection = modules[0].config.oqc
        named = set(injection.get("modules", ()))
        holder = next((m for m in modules if named <= {path for path, _ in m.named_modules()}), None)
        if holder is None and injection in restored:
            modules[0].config.oqc = restored[restored.index(injection)]
            continue
        if holder is None:  # it was a part of the model that was injected
            holder, injection = modules[0], _below(injection, modules[0])
            holder.config.oqc = injection
        restore(holder, injection)
        restored.append(holder.config.oqc)


def _below(injection: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """An injection with its paths as this module has them, where they are those of a model that it was a part of."""
    own, paths = {path for path, _ in module.named_modules()}, [path.split(".") for path in injection["modules"]]
    for depth in range(1, min(map(len, paths))):
        inner = [".".join(path[depth:]) for path in paths]
        if len({tuple(path[:depth]) for path in paths}) == 1 and own.issuperset(inner):
            return {**injection, "modules": inner}
    return injection


def _configs(config: Any) -> list[Any]:
    """A config and those inside it."""
    inner = [value for value in vars(config).values() if isinstance(value, transformers.PretrainedConfig)]
    return [config, *(part for value in inner for part in _configs(value))]
