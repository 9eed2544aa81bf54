"""The place of dispatch: which backend computes the output of a feed-forward network with a complement.

`reference` follows the paper's equations at width H; `torch` uses the rank-space identity; `triton` the same through
fused kernels. `auto` takes the identity wherever it is valid, and the kernels wherever they run. Asked for `triton`
where its kernels do not run (no NVIDIA GPU of compute capability 8.0 or above, float64, rank below 3 or above 128,
inside a torch.func transform or forward-mode differentiation, tensors in shards), the torch backend takes over. Every
backend reads the same parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oqc.config import BACKENDS, check_choice
from oqc.ops import device as devices
from oqc.ops import fused, rankspace, reference
from oqc.ops.attention import attention_in_use, self_attention
from oqc.ops.modules import activation_in_use, activation_name, acts, fits, has_hooks, is_plain, mark_activation
from oqc.ops.norm import Norm, ahead, residual_norm
from oqc.ops.reference import Map, Space
from oqc.ops.streams import fork, join

__all__ = [
    "Norm",
    "activation_in_use",
    "activation_name",
    "acts",
    "ahead",
    "attention_in_use",
    "ffn_output",
    "fits",
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


def what_runs(backend: str, device: torch.device) -> str:
    """The backend that runs on this device for the one asked for, where the layers themselves do not stand against
    it: `auto` is the fastest, and without its kernels `triton` is `torch`."""
    if backend == "reference" or backend == "torch":
        return backend
    asked = backend == "triton" or device.type == "cuda"
    return "triton" if asked and devices.runs_on(device) else "torch"


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
