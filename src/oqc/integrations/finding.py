"""Where a model's feed-forward networks are, and why some are left alone."""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from oqc.integrations.layouts import Layout, candidates, recognise, sizes
from oqc.nn import OQCFFN

_INSIDE = re.compile(  # classes whose MLPs are not a block's; timm's PartitionAttention2d and Cl are blocks
    r"Attention\w*Pool|Attention(V\d)?$|^Attention(2d|Cl)$|^Rel(ative)?Pos\w*(Bias|Mlp)"
)


@dataclass(frozen=True, kw_only=True)
class Found:
    path: str
    module: nn.Module
    layout: Layout | None  # None: an OQCFFN, which knows its own
    width: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Skipped:
    path: str
    reason: str


def find(model: nn.Module) -> tuple[list[Found], list[Skipped]]:
    """Feed-forward networks in the order of the model's modules, and what looks like one but was left alone."""
    found: list[Found] = []
    skipped: list[Skipped] = []
    known: dict[tuple[object, ...], Layout | None] = {}
    inside: str | None = None  # of a network already taken, or of a module to leave alone
    for path, module in model.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        if isinstance(module, OQCFFN):
            found.append(
                Found(
                    path=path,
                    module=module,
                    layout=None,
                    width=module.in_features,
                    hidden=module.hidden_features,
                )
            )
            inside = _within(path)
        elif path and _INSIDE.search(type(module).__name__):
            skipped += _mlps_of(path, module)
            inside = _within(path)
        elif _is_split(model, path, module) or _linear_pair(module):
            if "forward" in vars(module):
                reason = "its forward was replaced on the object (accelerate's hooks?): inject before that"
                skipped.append(Skipped(path=path, reason=reason))
                inside = _within(path)
                continue
            try:
                layout = _recognise_once(module, _is_split(model, path, module), known)
            except (RuntimeError, TypeError) as error:  # of the copy that would prove it
                reason = f"it cannot be copied to find out its form: {str(error).partition('. ')[0]}"
                skipped.append(Skipped(path=path, reason=reason))
                inside = _within(path)
                continue
            if layout is not None:
                width, hidden = sizes(module, layout)
                found.append(Found(path=path, module=module, layout=layout, width=width, hidden=hidden))
                inside = _within(path)
            else:
                reason = f"{type(module).__name__} does more than a map up, an activation and a map down"
                skipped.append(Skipped(path=path, reason=reason))
        elif _convolutional(module):
            skipped.append(Skipped(path=path, reason="its maps are convolutions"))
        elif (other := _other_linear(module)) is not None:
            reason = f"it has a {other} in place of an nn.Linear (LoRA?): inject before that"
            skipped.append(Skipped(path=path, reason=reason))
    return found, skipped


def input_of(cls: type[nn.Module]) -> str:
    """What a class's forward calls its input."""
    return list(inspect.signature(cls.forward).parameters)[1]


def _within(path: str) -> str:
    return f"{path}." if path else ""


def _recognise_once(module: nn.Module, split: bool, known: dict[tuple[object, ...], Layout | None]) -> Layout | None:
    """Blocks of one model are alike: equal class, children, settings and functions have one layout."""
    own = vars(module).items()
    settings = {k: v for k, v in own if isinstance(v, (bool, int, float, str))}
    settings |= {k: id(v) for k, v in own if callable(v)}
    key = (type(module), repr(module), repr(settings), split)
    if key not in known:
        known[key] = recognise(module, split)
    return known[key]


def _linear_pair(module: nn.Module) -> bool:
    return next(candidates(module), None) is not None


def _convolutional(module: nn.Module) -> bool:
    fc1, fc2 = (getattr(module, name, None) for name in ("fc1", "fc2"))
    return (
        isinstance(fc1, nn.Conv2d)
        and isinstance(fc2, nn.Conv2d)
        and fc1.kernel_size == fc2.kernel_size == (1, 1)
        and fc1.in_channels == fc2.out_channels <= fc1.out_channels
    )


def _other_linear(module: nn.Module) -> str | None:
    """The class of a child that stands where a linear layer was, in what is otherwise a map up and a map down."""
    layers: list[Any] = [part for part in module.children() if _has_sizes(part)]
    for up, down in itertools.permutations(layers, 2):
        width, hidden = down.out_features, down.in_features
        if up.in_features == width < hidden and up.out_features in (hidden, 2 * hidden):
            kinds = [type(layer) for layer in (up, down) if not isinstance(layer, nn.Linear)]
            return f"{kinds[0].__module__}.{kinds[0].__qualname__}" if kinds else None
    return None


def _has_sizes(part: nn.Module) -> bool:
    return all(isinstance(getattr(part, name, None), int) for name in ("in_features", "out_features"))


def _mlps_of(path: str, module: nn.Module) -> list[Skipped]:
    """The MLP of an attention pool, or of an attention's position bias: it is not a block's, so it stays."""
    inner = [
        name
        for name, part in module.named_modules()
        if name and not _INSIDE.search(type(part).__name__) and _linear_pair(part)
    ]
    return [Skipped(path=f"{path}.{name}", reason=f"part of {type(module).__name__}") for name in inner]


def _is_split(model: nn.Module, path: str, module: nn.Module) -> bool:
    """transformers' older form: `intermediate` holds the map up and the activation, its sibling `output` the rest."""
    parent, _, name = path.rpartition(".")
    if name != "intermediate":
        return False
    up, down = (
        getattr(module, "dense", None),
        getattr(getattr(model.get_submodule(parent), "output", None), "dense", None),
    )
    return (
        isinstance(up, nn.Linear)
        and isinstance(down, nn.Linear)
        and (up.in_features, up.out_features) == (down.out_features, down.in_features)
    )


def quantised(model: nn.Module) -> str | None:
    """The first layer, with its path, whose weight is not a plain floating-point tensor."""
    for path, module in model.named_modules():
        if not (hasattr(module, "in_features") and hasattr(module, "out_features")):
            continue
        weight = getattr(module, "weight", None)
        plain = isinstance(weight, Tensor) and weight.is_floating_point() and "torchao" not in type(weight).__module__
        if not plain and (weight is not None or "quant" in type(module).__module__):
            return f"{path} ({type(module).__name__})"
    return None
