"""What a module is to the kernels: just its weights, watched by hooks, or an activation that they have."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as calls
from torch.utils.module_tracker import ModuleTracker

from oqc.ops.plain import ACTIVATIONS


def is_plain(*modules: object) -> bool:
    """Whether each module is exactly the map its own weight makes it: an `nn.Linear` or `nn.Conv2d` itself, or of a
    class that gives its `dense_weight`, no hooks.

    LoRA layers are other classes, and so are parametrized and most quantised ones; torchao quantises, and DTensor
    shards, by a weight that stands for other tensors. For all those the identity does not hold.
    """
    for module in modules:
        if module is None:
            continue
        known = type(module) in (nn.Linear, nn.Conv2d) or "dense_weight" in vars(type(module))
        if not known or has_hooks(module):
            return False
        if hasattr(type(getattr(module, "weight", None)), "__tensor_flatten__"):
            return False
    return True


def fits(x: Tensor, *modules: object) -> bool:
    """Whether operators can take these layers for x: plain ones, with their weights at hand (not sharded) in x's dtype,
    or any under autocast."""
    if not is_plain(*modules):
        return False
    weights = [layer.weight for layer in modules if isinstance(layer, nn.Module)]
    if not all(type(weight) in (Tensor, nn.Parameter) for weight in weights):
        return False
    return torch.is_autocast_enabled(x.device.type) or all(weight.dtype == x.dtype for weight in weights)


def acts(part: Any) -> bool:
    """Whether a module does anything right now to what passes it, so that it cannot be left out."""
    if has_hooks(part):
        return True
    return bool(part.training and part.p > 0) if type(part) is nn.Dropout else type(part) is not nn.Identity


def has_hooks(module: Any) -> bool:
    """Whether calling the module does more than its class's forward."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    hooks = before or after or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__ or _every_call_has_hooks()


def _every_call_has_hooks() -> bool:
    """Whether hooks are registered for all modules at once, other than FlopCounterMode's: those only note which module
    runs, and what it counts has to be what runs without it."""
    if not calls._has_any_global_hook():
        return False
    before, after = calls._global_forward_pre_hooks, calls._global_forward_hooks
    if calls._global_backward_hooks or calls._global_backward_pre_hooks:
        return True
    hooks = itertools.chain(before.values(), after.values())
    return any(type(getattr(hook, "__self__", None)) is not ModuleTracker for hook in hooks)


def activation_name(act: Callable[[Tensor], Tensor]) -> str | None:
    """Which of the activations that kernels have this is, by what it does to some numbers in training and in
    evaluation; None: none of them, or a module that holds tensors or others, which may change."""
    if isinstance(act, nn.Module):
        held = itertools.chain(vars(act).values(), act.parameters(), act.buffers(), act.children())
        if any(isinstance(item, (Tensor, nn.Module)) for item in held):
            return None
    far = torch.tensor([-1e4, -100.0, -20.0, 20.0, 100.0, 1e4], dtype=torch.float64, device="cpu")
    x = torch.cat([torch.linspace(-8, 8, 65, dtype=torch.float64, device="cpu"), far])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            ys = [form(x.clone()) for form in _forms(act)]
        known = ACTIVATIONS.items()
        return next((k for k, one in known if all(torch.allclose(y, one(x), rtol=0, atol=1e-9) for y in ys)), None)
    except Exception:  # of another kind, whatever it expects
        return None


def _forms(act: Any) -> list[Callable[[Tensor], Tensor]]:
    """An activation in each mode it has, without hooks."""
    return [copy.copy(act).train(mode).forward for mode in (True, False)] if isinstance(act, nn.Module) else [act]


def activation_in_use(act: object) -> str | None:
    """The name of an activation as it is now: one of ours, or a module that was found to be one (`mark_activation`).

    A module that took its place since, has hooks, or is set otherwise than it was then, has none.
    """
    for name, one in ACTIVATIONS.items():
        if act is one:
            return name
    if not isinstance(act, nn.Module) or has_hooks(act):
        return None
    found, settings = getattr(act, "_oqc_found", (None, ()))
    return found if all(getattr(act, key, None) == value for key, value in settings) else None


def mark_activation(act: object) -> None:
    """Finds out once which activation a module is, and leaves the name with it and what it was set to then."""
    name = activation_name(act) if isinstance(act, nn.Module) else None
    if name is not None:
        settings = [(key, value) for key, value in vars(act).items() if key[0] != "_" and key != "training"]
        act._oqc_found = (name, settings)  # type: ignore[attr-defined]
