"""The place of dispatch: which backend computes the output of a feed-forward network with a complement.

`reference` follows the paper's equations at width H; `torch` uses the rank-space identity; `triton` the same through
fused kernels. `auto` takes the identity wherever it is valid, and the kernels wherever they run. Asked for `triton`
where its kernels do not run (no GPU, float64, inside a torch.func transform), the torch backend takes over. Every
backend reads the same parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oqc.config import BACKENDS, check_choice
from oqc.ops import fused, operators, rankspace, reference
from oqc.ops.attention import attention_in_use, self_attention
from oqc.ops.norm import residual_norm
from oqc.ops.plain import ACTIVATIONS
from oqc.ops.reference import Map, Parts, Space
from oqc.ops.streams import fork, join

__all__ = [
    "BACKENDS",
    "Parts",
    "Space",
    "activation_in_use",
    "activation_name",
    "attention_in_use",
    "ffn_output",
    "fork",
    "fused",
    "has_hooks",
    "is_plain",
    "join",
    "mark_activation",
    "rankspace",
    "reference",
    "residual_norm",
    "self_attention",
    "what_runs",
]


def is_plain(*modules: object) -> bool:
    """Whether each module is exactly the map its own weight makes it: an `nn.Linear` or `nn.Conv2d` itself, no hooks.

    LoRA layers are other classes, and so are parametrized and most quantised ones; for those the identity does not
    hold. Quantisation that keeps the class and changes the weight's type is not recognised.
    """
    for module in modules:
        if module is not None and (type(module) not in (nn.Linear, nn.Conv2d) or has_hooks(module)):
            return False
    return True


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


def what_runs(backend: str, device: torch.device) -> str:
    """The backend that runs on this device for the one asked for, where the layers themselves do not stand against
    it: `auto` is the fastest, and without its kernels `triton` is `torch`."""
    if backend == "reference" or backend == "torch":
        return backend
    kernels = operators.HAS_TRITON and (device.type == "cuda" or (backend == "triton" and operators.INTERPRETED))
    return "triton" if kernels else "torch"


def ffn_output(
    b: Tensor,
    u: Tensor,
    v: Tensor,
    gate: Tensor,
    out: Map,  # W, or W with whatever stands between h and it
    lift: nn.Linear,  # O
    project: nn.Linear | None,  # P
    *,
    space: Space,
    normalise: bool = True,
    eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
    """out(b + gate * delta), by the backend asked for or, where the identity is not valid, literally."""
    check_choice("backend", backend, BACKENDS)
    if backend == "reference" or not is_plain(out, lift, project):
        parts = reference.update(b, u, v, lift, project, space=space, normalise=normalise, eps=eps)
        return out(reference.inject(b, parts.delta, gate))
    assert isinstance(out, nn.Linear)
    by_kernels = fused.chosen(backend, b, lift.weight.shape[1])
    output = fused.ffn_complement if by_kernels else rankspace.output
    return output(
        b,
        u,
        v,
        gate,
        out.weight,
        out.bias,
        lift.weight,
        None if project is None else project.weight,
        space=space,
        normalise=normalise,
        eps=eps,
    )
