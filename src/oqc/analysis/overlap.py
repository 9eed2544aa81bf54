"""What the projection does on real data: overlap of branch and host, before and after, and how the gate is used.

Streams over batches with the literal equations, in float32, and sums in float64. Formulas, over all tokens and blocks:

    before = mean |cos(q, m)|          after = mean |cos(q_perp, m)|
    hidden_cosine = mean |cos(delta, b)|, what reaches the network
    chance = E |cos| of two random directions in the space of the projection
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def chance_level(dimension: int) -> float:
    """E |cos| of two independent uniform directions: Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))."""
    return math.exp(math.lgamma(dimension / 2) - math.lgamma((dimension + 1) / 2)) / math.sqrt(math.pi)


def overlap(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float | None]:
    """Overlap and gate statistics of a model that returns intermediates; None where the model has no such part."""
    sums: dict[str, Tensor] = {}
    count = 0
    dimension = None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for x, _ in batches:
                _, named = model(x, intermediates=True)
                for prefix in [name.rpartition(".")[0] for name in named if name.endswith(".delta")]:
                    parts = {n.rpartition(".")[2]: t for n, t in named.items() if n.startswith(prefix + ".")}
                    found = {"hidden_cosine": _cosine(parts["delta"], parts["b"])}
                    gate = parts["gate"].double()
                    found |= {"gate_mean": gate, "gate_square": gate.square()}
                    if "m" in parts:
                        dimension = parts["m"].shape[-1]
                        found["before"] = _cosine(parts["q"], parts["m"])
                        found["after"] = _cosine(parts["q_perp"], parts["m"])
                    for name, value in found.items():
                        sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.sum().cpu()
                    count += parts["delta"].shape[:-1].numel()
    finally:
        model.train(was_training)
    means: dict[str, float | None] = {name: float(total) / count for name, total in sums.items()}
    square, mean = means.pop("gate_square", None), means.get("gate_mean")
    if square is not None and mean is not None:
        means["gate_std"] = math.sqrt(max(square - mean**2, 0.0))
    means["chance"] = None if dimension is None else chance_level(dimension)
    names = ("before", "after", "chance", "hidden_cosine", "gate_mean", "gate_std")
    return {name: means.get(name) for name in names}


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.cosine_similarity(a.double(), b.double(), dim=-1).abs()
