"""What a run is: frozen keyword-only dataclasses, to and from plain dicts, with a content hash.

`Run` holds a `Model` (which holds an `FFN`), a `Data` and a `Train`. Every field has the paper's value as its
default where the paper states one; `docs/deviations.md` lists the rest. Nothing here imports the rest of the package.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import numbers
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

HOSTS = ("mlp", "glu", "bilinear", "reglu", "geglu", "swiglu", "afbo")
COMPLEMENTS = ("none", "full", "lowrank", "static", "dynamic", "shared", "unprojected", "ungated", "equation")
BACKENDS = ("auto", "reference", "torch", "triton")
MODES = ("auto", "eager", "compiled", "graph")
PRECISIONS = ("bf16", "fp32", "fp64")


@dataclass(frozen=True, kw_only=True)
class FFN:
    """A host and the complement beside it."""

    host: str = "afbo"
    hidden: int | None = None  # host width H; None: at which the host has the parameters of an MLP of ratio `match`
    match: float = 4.0
    groups: int = 1  # AFBO only: 1 is the dense form of the paper's tables, 4 the grouped form
    complement: str = "none"
    rank: int = 56
    gate_init: float | None = None  # beta at the start; None: the complement's own (see nn/complements.py)
    eps: float = 1e-6
    drop: float = 0.0

    def __post_init__(self) -> None:
        _check_kinds(self)
        check_choice("host", self.host, HOSTS)
        check_choice("complement", self.complement, COMPLEMENTS)
        if self.hidden is not None:
            check_positive("hidden", self.hidden)
        check_positive("match", self.match)
        check_positive("groups", self.groups)
        check_positive("eps", self.eps)
        check_range("drop", self.drop, 0.0, 1.0)
        check_finite("gate_init", self.gate_init)
        if self.complement != "none" and self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Deep-ViT: pre-norm, learned positions, no class token, mean pooling after the final norm."""

    image_size: int = 32
    patch_size: int = 4
    channels: int = 3
    num_classes: int = 100
    width: int = 256
    depth: int = 8
    heads: int = 8
    readout: bool = True  # penultimate-residual readout
    ffn: FFN = field(default_factory=FFN)

    def __post_init__(self) -> None:
        _check_kinds(self)
        for name in ("image_size", "patch_size", "channels", "width", "depth", "heads"):
            check_positive(name, getattr(self, name))
        if self.num_classes < 0:
            raise ValueError(f"num_classes must be 0 (features only) or more, got {self.num_classes}")
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size, got image_size {self.image_size}"
                f" with patch_size {self.patch_size}"
            )
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got heads {self.heads} with width {self.width}")
        if self.readout and self.depth < 2:
            raise ValueError(f"readout needs a depth of at least 2, got depth {self.depth}")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, how they are split, and how the training part is augmented."""

    name: str = "cifar100"  # digits, cifar10, cifar100, tiny-imagenet, or a path: ImageFolder tree, .npz
    root: str | None = None  # where the official archive or folder lies; None: the pack in the cache, or a download
    image_size: int | None = None  # images of other sizes are resized to this when packed; None: as they are
    val: float = 0.0  # share of the training part held out for choices, stratified by class
    val_seed: int = 0  # the held-out part has its own seed, so it is the same for every run
    crop: int = 4  # random crop after padding by this much; 0: none
    flip: bool = True
    cutout: int = 0  # side of the square that is blanked; 0: none
    mixup: float = 0.0  # Beta parameter; 0: off
    cutmix: float = 0.0  # Beta parameter; 0: off

    def __post_init__(self) -> None:
        _check_kinds(self)
        check_range("val", self.val, 0.0, 0.9)
        for name in ("crop", "cutout", "mixup", "cutmix"):
            check_not_negative(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Train:
    """Optimisation: AdamW, warmup and cosine, clipping; and how the step is run."""

    epochs: int = 50
    batch: int = 512
    lr: float = 2e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    warmup: float = 5.0  # epochs, at most half of them all
    clip: float = 1.0  # global gradient norm; 0: off
    smoothing: float = 0.0
    ema: float = 0.0  # decay of the averaged weights; 0: off
    seed: int = 0
    precision: str = "bf16"
    tf32: bool = False
    deterministic: bool = True  # only kernels that repeat bit for bit
    mode: str = "auto"
    backend: str = "auto"
    eval_every: int = 1  # epochs
    nan_limit: int = 10  # non-finite steps in a row before the run stops

    def __post_init__(self) -> None:
        _check_kinds(self)
        for name in ("epochs", "batch", "lr", "adam_eps", "eval_every", "nan_limit"):
            check_positive(name, getattr(self, name))
        for name in ("weight_decay", "warmup", "clip"):
            check_not_negative(name, getattr(self, name))
        check_range("smoothing", self.smoothing, 0.0, 1.0)
        check_range("ema", self.ema, 0.0, 1.0)
        for beta in self.betas:
            check_range("betas", beta, 0.0, 1.0)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("mode", self.mode, MODES)
        check_choice("backend", self.backend, BACKENDS)


@dataclass(frozen=True, kw_only=True)
class Run:
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)

    def __post_init__(self) -> None:
        _check_kinds(self)


def check_choice(name: str, value: object, allowed: typing.Iterable[str]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}{nearest(str(value), allowed)}")


def nearest(value: str, allowed: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no allowed name is close."""
    name = _nearest(value, allowed)
    return f"; did you mean {name!r}?" if name else ""


def _nearest(value: str, allowed: typing.Iterable[str]) -> str:
    """The one name that begins with `value`, else the one that is most like it; nothing where none or several are."""
    allowed = list(allowed)
    begun = [name for name in allowed if value and name.startswith(value)]
    if len(begun) == 1:
        return begun[0]
    first, *others = [*difflib.get_close_matches(value, allowed, n=2, cutoff=0.6), ""]
    if others and others[0] and _likeness(value, first) == _likeness(value, others[0]):
        return ""  # as near as another one
    return first


def _likeness(value: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name, value).ratio()


def check_positive(name: str, value: float) -> None:
    if not (is_number(value) and 0 < value < math.inf):
        raise ValueError(f"{name} must be more than 0 and finite, got {value!r}")


def check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be 0 or more and finite, got {value}")


def check_finite(name: str, value: float | None) -> None:
    """None, which leaves it to a default, passes."""
    if value is not None and not (is_number(value) and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number, NumPy's too, as Python's own."""
    if not is_whole(value) or (least is not None and value < least):
        raise ValueError(f"{name} must be a whole number{'' if least is None else f' from {least} on'}, got {value!r}")
    return int(value)


def check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise ValueError(f"{name} must be at least {low:g} and less than {high:g}, got {value}")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain dict of a config, ready for JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def differences(one: Any, other: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The fields in which two configs of one class differ, by their path, with both values."""
    found: list[tuple[str, Any, Any]] = []
    for item in dataclasses.fields(one):
        a, b, path = getattr(one, item.name), getattr(other, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(a):
            found += differences(a, b, f"{path}.")
        elif a != b:
            found.append((path, a, b))
    return found


def from_dict(cls: type[T], values: dict[str, Any], path: str = "") -> T:
    """The config of class `cls` that `values` describes; unknown names and wrong types are named in the error."""
    if not isinstance(values, dict):
        raise ValueError(f"{path or cls.__name__} must be a table of fields, got {values!r}")
    kinds = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if name not in kinds:
            raise ValueError(f"unknown field {where!r}{nearest(name, kinds)}")
        given[name] = _coerce(kinds[name], value, where)
    return cls(**given)


def _coerce(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        cls = typing.cast(type, kind)
        return value if isinstance(value, cls) else from_dict(cls, value, where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _coerce(next(a for a in args if a is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(args):
            raise ValueError(f"{where} must be {len(args)} numbers, got {value!r}")
        return tuple(_coerce(a, v, where) for a, v in zip(args, value, strict=True))
    if kind is float and is_number(value):
        return float(value)
    if kind is int:
        return whole(where, value)
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be {_kind_name(kind)}, got {value!r}")
    return value


def _check_kinds(config: Any) -> None:
    """Names the first field that is of another kind than its annotation says; NumPy's numbers become Python's."""
    for name, kind in typing.get_type_hints(type(config)).items():
        object.__setattr__(config, name, _coerce(kind, getattr(config, name), name))


def _kind_name(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, str(kind))


def override(config: T, settings: typing.Iterable[str]) -> T:
    """`override(run, ["train.lr=1e-3", "model.ffn.rank=32"])`: the config with those fields set."""
    values = to_dict(config)
    for setting in settings:
        path, sep, text = setting.partition("=")
        if not sep:
            raise ValueError(f"a setting is written field=value, got {setting!r}")
        *parents, name = path.strip().split(".")
        table, kind = values, type(config)
        for parent in parents:
            hints = typing.get_type_hints(kind)
            if parent not in hints or not dataclasses.is_dataclass(hints[parent]):
                raise _unknown(path.strip(), type(config))
            table, kind = table[parent], typing.cast(Any, hints[parent])
        hints = typing.get_type_hints(kind)
        if name not in hints:
            raise _unknown(path.strip(), type(config))
        table[name] = _parse(hints[name], text.strip(), path)
    return from_dict(type(config), values)


def _unknown(path: str, cls: type) -> ValueError:
    """With the whole path of what may have been meant: a field of that name, or of one that is like it."""
    known, name = {one: one.rpartition(".")[2] for one in _paths(cls)}, path.rpartition(".")[2]
    meant = name if name in known.values() else _nearest(name, dict.fromkeys(known.values()))
    same = [repr(one) for one, last in known.items() if last == meant]
    hint = f"; did you mean {' or '.join(same)}?" if same else ""
    return ValueError(f"unknown field {path!r}{hint}")


def _paths(cls: type, prefix: str = "") -> typing.Iterator[str]:
    """Of all fields."""
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from _paths(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _parse(kind: Any, text: str, where: str) -> Any:
    args = typing.get_args(kind)
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        if text.lower() in ("none", "null"):
            return None
        return _parse(next(a for a in args if a is not type(None)), text, where)
    if typing.get_origin(kind) is tuple:
        return [_parse(args[0], part, where) for part in text.strip("()[] ").split(",")]
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise ValueError(f"{where} must be true or false, got {text!r}")
        return text.lower() in ("true", "1", "yes", "on")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{where} must be {_kind_name(kind)}, got {text!r}") from None
    return text


def content_hash(config: Any) -> str:
    """Twelve hex digits that name the content of a config."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()[:12]
