"""The one place of dispatch: which backend computes the output of a feed-forward network with a complement.

`reference` follows the paper's equations at width H; `torch` uses the rank-space identity; `triton` the same through
fused kernels. `auto` takes the identity wherever it is valid, and the kernels wherever they run. Asked for `triton`
where its kernels do not run (no GPU, float64, inside a torch.func transform), the torch backend takes over. Every
backend reads the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oqc.config import BACKENDS, check_choice
from oqc.ops import fused, operators, rankspace, reference
from oqc.ops.attention import attention_in_use, self_attention
from oqc.ops.reference import Map, Parts, Space

__all__ = [
    "BACKENDS",
    "Parts",
    "Space",
    "attention_in_use",
    "ffn_output",
    "fused",
    "in_one_product",
    "is_plain",
    "rankspace",
    "reference",
    "self_attention",
    "what_runs",
]


def is_plain(*modules: object) -> bool:
    """Whether each module is exactly the map its own weight makes it: an `nn.Linear` or `nn.Conv2d` itself, no hooks.

    LoRA layers are other classes, and so are parametrized and most quantised ones; for those the identity does not
    hold. Quantisation that keeps the class and changes the weight's type is not recognised.
    """
    for module in modules:
        if module is not None and (type(module) not in (nn.Linear, nn.Conv2d) or _has_hooks(module)):
            return False
    return True


def in_one_product(x: Tensor, layers: Sequence[nn.Module], backend: str) -> tuple[Tensor, ...] | None:
    """What linear layers make of x, which is then read once; None where each had better do it by itself.

    For compiled code, which joins the weights as it casts them: there it pays in training, beside the kernels.
    """
    if not torch.is_grad_enabled() or not fused.chosen(backend, x):
        return None
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if len(linear) < len(layers) or not is_plain(*linear):
        return None
    weights: list[Tensor] = [layer.weight for layer in linear]
    if not all(type(weight) in (Tensor, nn.Parameter) for weight in weights):  # sharded ones stay apart
        return None
    biases: list[Tensor] = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in linear
    ]
    bias = None if all(layer.bias is None for layer in linear) else torch.cat(biases)
    joined = F.linear(x, torch.cat(weights), bias)
    return joined.split([layer.out_features for layer in linear], dim=-1)


def _has_hooks(module: Any) -> bool:
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after or module._backward_hooks or module._backward_pre_hooks)


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
