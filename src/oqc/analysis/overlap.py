"""What the projection does on real data: overlap of branch and host, before and after, and how the gate is used.

Streams over batches with the literal equations, in float32, and sums in float64. Formulas, over all tokens and blocks:

    before = mean |cos(q, m)|          after = mean |cos(q_perp, m)|
    hidden_cosine = mean |cos(delta, b)|, what reaches the network
    chance = E |cos| of two random directions in the space of the projection
    gate_std is over tokens and blocks; gate_token_std over the tokens of a block, the blocks' variances averaged
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oqc.nn import Complement
from oqc.nn.modes import evaluating

METRICS = ("before", "after", "chance", "hidden_cosine", "gate_mean", "gate_std", "gate_token_std")

ROUNDING = 1e-12  # of a mean of squares in float64


def chance_level(dimension: int) -> float:
    """E |cos| of two independent uniform directions: Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))."""
    return math.exp(math.lgamma(dimension / 2) - math.lgamma((dimension + 1) / 2)) / math.sqrt(math.pi)


def overlap(model: nn.Module, batches: Iterable[Any], *, by_block: bool = False) -> dict[str, Any]:
    """Overlap and gate statistics of any model with complements: injected, built with `OQCFFN`, or ours.

    A batch is what the model takes: a tensor, a tuple or list that begins with it, or a dict of keyword arguments.
    Without `by_block`, METRICS over all tokens and blocks, None for what the model does not have; with it, the same for
    every feed-forward network that has a complement, by its path. A gate that is scaled by alpha counts scaled.
    """
    if isinstance(batches, (Tensor, Mapping)):
        raise ValueError("batches must be several, such as a loader or a list; put a single batch into a list")
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise ValueError(f"batches must be several, such as a loader or a list, got {type(batches).__name__}")
    model = getattr(model, "_orig_mod", model)  # what torch.compile runs calls no hooks
    networks = {path: one for path, one in model.named_modules() if isinstance(_branch(one), Complement)}
    if not networks:
        raise ValueError(f"{type(model).__name__} has no complement to measure; call oqc.inject(model) first")
    whole = OverlapSums()
    sums = {path: OverlapSums() if by_block else whole for path in networks}
    called: set[str] = set()

    def watch(path: str) -> Callable[[Any, Any, Any], None]:
        def look(network: Any, args: Any, keywords: Any) -> None:
            x = args[0] if args else keywords[getattr(network, "oqc_input", "x")]
            _, named = network.intermediates(x)
            sums[path].add({f"{path}.{name}": value for name, value in named.items()})
            called.add(path)

        return look

    hooks = [network.register_forward_pre_hook(watch(path), with_kwargs=True) for path, network in networks.items()]
    try:
        with evaluating(model):
            for batch in batches:
                _call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    for path in networks:
        if path not in called:
            raise ValueError(f"batches must reach every complement, but none came to {path!r}")
    return {path: one.means() for path, one in sums.items()} if by_block else whole.means()


def _branch(module: nn.Module) -> object:
    return getattr(module, "complement", None)


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
        return
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    nothing = x is None or (isinstance(x, (tuple, list)) and not x)
    if nothing or isinstance(x, (str, bytes, int, float)):  # a model of one's own may take a list, a dict, ...
        raise ValueError(
            "batches must hold tensors, tuples or lists that begin with one, or dicts of keyword arguments, got"
            f" {type(batch).__name__}{'' if x is batch else f' that begins with {type(x).__name__}'}"
        )
    model(x)


class OverlapSums:
    """Sums over the intermediates of batch after batch. They stay on the device: only `means` waits for it."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.blocks: dict[str, tuple[Tensor, int]] = {}  # the sum of each block's gates, and their number
        self.count = 0  # tokens, each once a block
        self.dimension: int | None = None

    def add(self, named: Mapping[str, Tensor]) -> None:
        """Takes in what a model returns with `intermediates=True`."""
        for prefix in [name.removesuffix("delta") for name in named if name.endswith(".delta")]:
            parts = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
            tokens, gate = parts["delta"].shape[:-1].numel(), parts["gate"].double()
            gates, before = self.blocks.get(prefix, (gate.new_zeros(()), 0))
            self.blocks[prefix] = gates + gate.sum(), before + tokens
            found = {
                "hidden_cosine": _cosine(parts["delta"], parts["b"]),
                "gate_mean": gate,
                "gate_square": gate.square(),
            }
            if "m" in parts:
                self.dimension = parts["m"].shape[-1]
                found["before"] = _cosine(parts["q"], parts["m"])
                found["after"] = _cosine(parts["q_perp"], parts["m"])
            for name, value in found.items():
                total = value.sum()
                self.sums[name] = self.sums[name] + total if name in self.sums else total
            self.count += tokens

    def means(self) -> dict[str, float | None]:
        """The metrics; None where the model has no such part or the sum is not finite."""
        means = {name: float(total) / self.count for name, total in self.sums.items()}
        if "gate_square" in means:
            square = means.pop("gate_square")
            of_blocks = sum(float(total) ** 2 / tokens for total, tokens in self.blocks.values()) / self.count
            means["gate_std"] = math.sqrt(max(square - means["gate_mean"] ** 2, 0.0))
            means["gate_token_std"] = 0.0 if square - of_blocks <= ROUNDING * square else math.sqrt(square - of_blocks)
        if self.dimension is not None:
            means["chance"] = chance_level(self.dimension)
        return {name: means[name] if math.isfinite(means.get(name, math.nan)) else None for name in METRICS}


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.cosine_similarity(a.double(), b.double(), dim=-1).abs()
