"""A complement in every block of a built model: `inject`, `remove`, `trainable`.

A feed-forward network stays the object it is. It gets one more child, `complement`, and its class becomes a subclass of
its own class whose forward goes through the network's `Layout`. So its weights, hooks, names in the state dict and
`isinstance` checks stay, and `remove` deletes the child and gives the class back.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oqc import ops, seeding
from oqc.config import BACKENDS, check_choice, check_finite, check_positive, is_whole, whole
from oqc.integrations.finding import Found, find, quantised
from oqc.integrations.freezing import freeze, thaw
from oqc.integrations.injected import Injected, injected_class
from oqc.integrations.report import Replaced, Report
from oqc.integrations.wrappers import check_model, check_not_parallel, check_not_wrapped, uncompiled
from oqc.nn import KINDS, OQCFFN, Complement
from oqc.nn.complements import INITS, check_rank, seed_of_now

Blocks = str | slice | Iterable[int]
SETTINGS = ("complement", "rank", "init", "gate_init", "eps", "backend")
RECORD = "_oqc_record"  # of an injected network: the oqc entry of a transformers config, and its own path there


def inject(
    model: nn.Module,
    complement: str = "lowrank",
    rank: int = 56,
    *,
    blocks: Blocks = "all",
    init: str = "identity",
    gate_init: float | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
    seed: int | None = None,
    example: Tensor | None = None,
) -> Report:
    """Puts a complement beside each feed-forward network of a built model, in place, and says what it did.

    `blocks` are numbers among the model's feed-forward networks, in its order: "all", a slice or a list.
    `init="identity"` leaves the outputs as they are, for fine-tuning; `"paper"` starts as in training from scratch.
    `seed` fixes the branch's start; without one it follows from the state of PyTorch's generator, which is not moved,
    and from the host's weights.
    With an `example` input, the report has FLOPs an image besides FLOPs a token.
    """
    check_choice("complement", complement, KINDS)
    check_choice("init", init, INITS)
    check_choice("backend", backend, BACKENDS)
    check_model(model)
    rank, seed = whole("rank", rank), None if seed is None else whole("seed", seed, 0)
    check_finite("gate_init", gate_init)
    check_positive("eps", eps)
    if not isinstance(example, (Tensor, type(None))):
        raise ValueError(f"example must be None or a tensor, an input of the model, got a {type(example).__name__}")
    if example is not None and not example.numel():
        raise ValueError(f"example must hold an input or several, got one of shape {list(example.shape)}")
    model = uncompiled(model)
    check_not_parallel(model)
    kind = type(model).__name__
    layer = quantised(model)
    if layer is not None:
        raise ValueError(f"{kind} is quantised: {layer}; inject the complement before quantising")
    taken = next((path for path, _ in complements(model)), None)
    if taken is not None:
        way = "call oqc.remove(model) first" if any(injected(model)) else "it was built with it, so build it without"
        raise ValueError(f"{kind} has a complement already, in {taken or 'itself'}; {way}")
    found, skipped = find(model)
    if not found:
        raise ValueError(_nothing(kind, [f"{s.path or 'itself'}: {s.reason}" for s in skipped]))
    chosen = _choose(blocks, found, kind)
    for one in chosen:
        check_rank(rank, one.hidden, f" of {one.path}" if one.path else "")
    settings: dict[str, Any] = {"gate_init": gate_init, "init": init, "eps": eps}
    for one in chosen:
        like = next(p for p in one.module.parameters() if p.dim() > 1)
        branch = Complement(
            complement, one.width, one.hidden, rank, **settings, device=like.device, dtype=like.dtype
        ).train(one.module.training)
        if not like.is_meta:
            own = seed_of_now(torch.device("cpu"), like) if seed is None else seed
            branch.init_weights(seeding.generator(own, "branch", one.path, device=like.device))
        _attach(one, branch, backend)
    _record(model, chosen)
    report = Report(
        model=kind,
        complement=complement,
        rank=rank,
        replaced=tuple(Replaced.of(one.path, one.module, one.width, one.hidden) for one in chosen),
        skipped=tuple(skipped),
        left_out=len(found) - len(chosen),
    )
    if example is None:
        return report
    try:
        return report.measured(model, example)
    except Exception as error:
        _detach(model, [one.module for one in chosen])
        raise ValueError(f"example of shape {list(example.shape)} does not run through {kind}: {error}") from error


def remove(model: nn.Module) -> None:
    """Undoes `inject`, in a part of the model or all of it: every module is what it was before.

    What `trainable` and `fold` froze there is thawed.
    """
    check_model(model)
    model = uncompiled(model)
    check_not_wrapped(model, "oqc.remove")
    modules = [module for _, module in injected(model)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no injected complement: there is nothing to undo")
    _detach(model, modules)
    thaw(model)


def trainable(
    model: nn.Module, part: str = "complement", *, also: nn.Module | Iterable[nn.Module] = ()
) -> list[nn.Parameter]:
    """The parameters to train: freezes everything but the complements and the modules in `also`, such as a new head,
    which need not be part of the model.

    With "all" it thaws what oqc froze before; what the model or you froze, as fixed positions are, stays so.
    """
    check_choice("part", part, ("complement", "all"))
    check_model(model)
    model = uncompiled(model)
    check_not_wrapped(model, "oqc.trainable")
    others: list[Any] = [also] if isinstance(also, nn.Module) or not isinstance(also, Iterable) else list(also)
    for other in others:
        if not isinstance(other, nn.Module):
            raise ValueError(f"also must be a module, such as model.head, or several, got {type(other).__name__}")
    branches = [module.complement for _, module in complements(model)]
    if not branches and part == "complement":
        raise ValueError(f"{type(model).__name__} has no complement to train; call oqc.inject(model) first")
    if is_folded(model):
        raise ValueError(f"{type(model).__name__} is folded, which is for inference alone: train one that is not")
    kept = [parameter for module in (*branches, *others) for parameter in module.parameters()]  # type: ignore[union-attr]
    thaw(model)
    for parameter in kept:
        parameter.requires_grad_()
    if part == "complement":
        freeze(model, kept)
    own = {id(parameter) for parameter in model.parameters()}
    beside = {id(p): p for p in kept if id(p) not in own}
    return [*(parameter for parameter in model.parameters() if parameter.requires_grad), *beside.values()]


def complements(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Feed-forward networks that have a complement, however they came to it, with their paths."""
    for path, module in model.named_modules():
        if isinstance(module, Injected) or (isinstance(module, OQCFFN) and module.complement is not None):
            yield path, module


def injected(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those that have it by `inject`."""
    for path, module in complements(model):
        if isinstance(module, Injected) or module.options["complement"] == "none":  # type: ignore[index]
            yield path, module


def is_folded(model: nn.Module) -> bool:
    """Whether any complement keeps products of weights, as `folding.fold` makes them."""
    return any(module.complement.merged is not None for _, module in complements(model))  # type: ignore[union-attr]


def specification(model: nn.Module) -> dict[str, Any] | None:
    """The injection as plain data, ready for JSON: its settings and the paths of the modules; None: there is none."""
    found = {path: _settings(module) for path, module in injected(model)}
    if not found:
        return None
    first, values = next(iter(found.items()))
    other = next((path for path, own in found.items() if own != values), None)
    if other is not None:
        raise ValueError(
            f"{first} and {other} were injected with different settings, and a saved model has one injection: save its"
            " state_dict() with safetensors, and inject the parts again before loading it"
        )
    return {**dict(zip(SETTINGS, values, strict=True)), "modules": list(found)}


def _settings(module: Any) -> tuple[Any, ...]:
    branch: Complement = module.complement
    backend = module.backend if isinstance(module, OQCFFN) else module.oqc_backend
    return branch.name, branch.rank, branch.init, branch.gate_init, branch.eps, backend


def restore(model: nn.Module, specification: dict[str, Any]) -> None:
    """Injects what a `specification` says, into the modules it names."""
    if set(specification) != {*SETTINGS, "modules"}:
        raise ValueError(f"an injection has the fields {', '.join(SETTINGS)} and modules, got {sorted(specification)}")
    paths = [one.path for one in find(model)[0]]
    unknown = sorted(set(specification["modules"]) - set(paths))
    if unknown:
        raise ValueError(f"{type(model).__name__} has no feed-forward network {unknown[0]!r}")
    settings = {name: specification[name] for name in SETTINGS}
    config: Any = getattr(model, "config", None)
    if tells(config) and config.oqc == specification:  # of this model, and not of another that shares the config
        del config.oqc
    inject(model, **settings, blocks=[paths.index(path) for path in specification["modules"]], seed=0)


def _attach(one: Found, branch: Complement, backend: str) -> None:
    module = one.module
    if isinstance(module, OQCFFN):
        module.complement, module.backend = branch, backend
        return
    assert one.layout is not None
    ops.mark_activation(one.layout.activation(module))
    module.complement = branch
    module.oqc_layout, module.oqc_backend = one.layout, backend  # type: ignore[assignment]
    module.__class__ = injected_class(type(module))


def _detach(model: nn.Module, modules: list[nn.Module]) -> None:
    for module in modules:
        record, path = vars(module).pop(RECORD, ({}, ""))
        if path in record.get("modules", ()):
            record["modules"].remove(path)
        if isinstance(module, OQCFFN):
            module.complement, module.backend = None, module.options["backend"]
        elif isinstance(module, Injected):
            act = module.oqc_layout.activation(module)
            if isinstance(act, nn.Module):
                vars(act).pop("_oqc_found", None)
            module.__class__ = module.oqc_base  # type: ignore[assignment]
            del module.complement, module.oqc_layout, module.oqc_backend
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "oqc") and not (tells(config) and _stands(module, config.oqc)):
            del config.oqc


def _choose(blocks: Blocks, found: list[Found], kind: str) -> list[Found]:
    if isinstance(blocks, slice):
        chosen = found[blocks]
    elif isinstance(blocks, str):
        if blocks != "all":
            raise ValueError(_blocks_are(blocks))
        chosen = found
    else:
        picks = list(blocks) if isinstance(blocks, Iterable) else [None]
        for number in picks:
            if not is_whole(number):
                raise ValueError(_blocks_are(blocks))
            if not -len(found) <= number < len(found):
                raise ValueError(
                    f"blocks has {number}, but {kind} has {len(found)} feed-forward networks: 0 to {len(found) - 1}"
                )
        picked = {number % len(found) for number in picks}
        chosen = [one for i, one in enumerate(found) if i in picked]
    if not chosen:
        raise ValueError(
            f"blocks {blocks!r} picks none of the {len(found)} feed-forward networks of {kind}: 0 to {len(found) - 1}"
        )
    return chosen


def _blocks_are(given: object) -> str:
    return f'blocks must be "all", a slice or a list of whole numbers, got {given!r}'


def _nothing(kind: str, reasons: list[str]) -> str:
    left = f" (left alone: {'; '.join(reasons[:3])})" if reasons else ""
    return (
        f"{kind} has no feed-forward network of a known form: inject looks for modules with an nn.Linear up, an"
        f" activation and an nn.Linear down{left}; pass the model that holds the blocks, or build it with oqc.OQCFFN"
    )


def tells(config: object) -> bool:
    """Whether a transformers config tells of an injection."""
    record = getattr(config, "oqc", None)
    paths = record.get("modules") if isinstance(record, dict) else None
    return isinstance(paths, list) and bool(paths) and all(isinstance(path, str) for path in paths)


def _stands(module: nn.Module, record: dict[str, Any]) -> bool:
    """Whether anything of what a config tells may still be there: not where all of it is below this module, and none of
    it injected. A config that was copied since the injection does not change with the one that `remove` knows."""
    below = dict(module.named_modules())
    named = [below.get(path) for path in record["modules"]]
    return None in named or any(getattr(one, "complement", None) is not None for one in named)


def _record(model: nn.Module, chosen: list[Found]) -> None:
    """Lets a transformers model's config tell of the injection, so that its own `save_pretrained` does, and that of a
    larger model which it is a part of."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_diff_dict"):
        record = specification(model)
        if any(tells(getattr(module, "config", None)) for module in model.modules()):
            config = _own_config(model)
        config.oqc = record
        for one in chosen:
            vars(one.module)[RECORD] = record, one.path
    elif any(hasattr(getattr(module, "config", None), "to_diff_dict") for module in model.modules()):
        warnings.warn(
            f"the injected {type(model).__name__} is a part of a transformers model without a config of its own: inject"
            " the model with blocks=..., or save it with oqc.save; its save_pretrained would not tell of the branch",
            stacklevel=3,
        )


def _own_config(model: Any) -> Any:
    """A copy of the config that a model shares with another injected one, in its place, without the other's entry."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = getattr(module, "config", None)
        if id(config) in copies:
            module.config = copies[id(config)]
            vars(module.config).pop("oqc", None)
    return model.config
