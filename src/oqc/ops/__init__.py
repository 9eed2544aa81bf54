"""The one place of dispatch: which backend computes the output of a feed-forward network with a complement.

`reference` follows the paper's equations at width H; `torch` uses the rank-space identity. `auto` takes the identity
wherever it is valid. Every backend reads the same parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oqc.config import BACKENDS, check_choice
from oqc.ops import rankspace, reference
from oqc.ops.reference import Map, Parts, Space

__all__ = ["BACKENDS", "Parts", "Space", "fastest", "ffn_output", "is_plain", "rankspace", "reference"]


def is_plain(*modules: object) -> bool:
    """Whether each module is exactly a linear map by its own weight: an `nn.Linear` itself, with no hooks on it.

    LoRA and quantised layers are other classes, and so are parametrized ones; for those the identity does not hold.
    """
    return all(
        m is None or (type(m) is nn.Linear and not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks))
        for m in modules
    )


def fastest(device: torch.device) -> str:
    """The backend that `auto` takes on this device where nothing stands against it."""
    return "torch"


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
    return rankspace.output(
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
