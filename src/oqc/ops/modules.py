"""What a module is to the kernels: just its weights, watched by hooks, or an activation that they have."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oqc.ops.plain import ACTIVATIONS


def is_plain(*modules: object) -> bool:
    """Whether each module is exactly the map its own weight makes it: an `nn.Linear` or `nn.Conv2d` itself, no hooks.

    LoRA layers are other classes, and so are parametrized and most quantised ones; for those the identity does not
    hold. Quantisation that keeps the class and changes the weight's type is not recognised.
    """
    for module in modules:
        if module is not None and (type(module) not in (nn.Linear, nn.Conv2d) or has_hooks(module)):
            return False
    return True


def fits(x: Tensor, *modules: object) -> bool:
    """Whether operators can take these layers for x: plain ones, with their weights at hand (not sharded) in x's dtype,
    or any under autocast."""
    if not is_plain(*modules):
        return False
    weights = [layer.weight for layer in modules if isinstance(layer, (nn.Linear, nn.Conv2d))]
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
    return bool(hooks) or "forward" in module.__dict__


def activation_name(act: Callable[[Tensor], Tensor]) -> str | None:
    """Which of the activations that kernels have this is, by what it does to some numbers; None: none of them."""
    if isinstance(act, nn.Module) and next(itertools.chain(act.parameters(), act.buffers()), None) is not None:
        return None
    far = torch.tensor([-1e4, -100.0, -20.0, 20.0, 100.0, 1e4], dtype=torch.float64, device="cpu")
    x = torch.cat([torch.linspace(-8, 8, 65, dtype=torch.float64, device="cpu"), far])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            y = act(x.clone())
        return next((name for name, one in ACTIVATIONS.items() if torch.allclose(y, one(x), rtol=0, atol=1e-9)), None)
    except Exception:  # of another kind, whatever it expects
        return None


def activation_in_use(act: object) -> str | None:
    """The name of an activation as it is now: one of ours, or a module that was found to be one (`mark_activation`).

    A module that took its place since, or has hooks, has none.
    """
    for name, one in ACTIVATIONS.items():
        if act is one:
            return name
    return getattr(act, "oqc_name", None) if isinstance(act, nn.Module) and not has_hooks(act) else None


def mark_activation(act: object) -> None:
    """Finds out once which activation a module is, and leaves the name with it."""
    name = activation_name(act) if isinstance(act, nn.Module) else None
    if name is not None:
        act.oqc_name = name  # type: ignore[attr-defined]
