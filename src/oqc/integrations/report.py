"""What an injection did, as data and as text."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from oqc.integrations.finding import Skipped
from oqc.nn import Complement
from oqc.nn.modes import evaluating


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """One feed-forward network that got a complement."""

    path: str
    kind: str
    width: int
    hidden: int
    parameters: int  # added
    flops: int  # added for one token, a multiply-add counted as two
    flops_once: int  # added for a batch of any size: the products of weights, which a folded model has at hand

    @classmethod
    def of(cls, path: str, module: nn.Module, width: int, hidden: int) -> Replaced:
        branch = module.complement
        assert isinstance(branch, Complement)
        return cls(
            path=path,
            kind=type(module).__name__.removesuffix("WithComplement"),
            width=width,
            hidden=hidden,
            parameters=sum(p.numel() for p in branch.parameters()),
            flops=_token_flops(branch, width, hidden),
            flops_once=2 * hidden * branch.rank * (width + (branch.rank if branch.kind.normalise else 0)),
        )


def _token_flops(branch: Complement, width: int, hidden: int) -> int:
    """Matrix products of the rank-space form that every token needs."""
    rank, kind = branch.rank, branch.kind
    maps = 0 if kind.shared else 2 * width * rank
    seen = hidden * rank if kind.space != "none" else 0  # P b, or O^T b
    energy = rank * rank if kind.normalise else 0
    gate = width if kind.gate == "token" else 0
    return 2 * (maps + seen + energy + gate + rank * width)


@dataclass(frozen=True, kw_only=True)
class Report:
    model: str
    complement: str
    rank: int
    replaced: tuple[Replaced, ...]
    skipped: tuple[Skipped, ...]
    left_out: int  # feed-forward networks that `blocks` did not pick
    flops_per_image: int | None = None

    @property
    def parameters(self) -> int:
        """Added in all."""
        return sum(one.parameters for one in self.replaced)

    @property
    def flops_per_token(self) -> int:
        """Added for a token that passes every one of them."""
        return sum(one.flops for one in self.replaced)

    @property
    def flops_per_batch(self) -> int:
        """Added once a batch, however large: M = W O and G = O^T O of every network."""
        return sum(one.flops_once for one in self.replaced)

    def measured(self, model: nn.Module, example: Tensor) -> Report:
        """With FLOPs an image: each network's own, times the tokens that it sees of the example."""
        total = 0
        handles = []
        for one in self.replaced:

            def count(network: Any, args: Any, named: dict[str, Any], one: Replaced = one) -> None:
                nonlocal total
                x = args[0] if args else named[getattr(network, "oqc_input", "x")]
                total += x.numel() // one.width * one.flops

            handles.append(model.get_submodule(one.path).register_forward_pre_hook(count, with_kwargs=True))
        try:
            with evaluating(model):
                model(example)
        finally:
            for handle in handles:
                handle.remove()
        return dataclasses.replace(self, flops_per_image=total // example.shape[0])

    def __str__(self) -> str:
        count = len(self.replaced)
        image = "" if self.flops_per_image is None else f"{self.flops_per_image:,} an image, "
        lines = [
            f"{self.model}: {self.complement} complement, rank {self.rank}, in {count} of {count + self.left_out}"
            f" feed-forward networks; {self.parameters:,} parameters added",
            f"  FLOPs added: {image}{self.flops_per_token:,} for a token that passes all of them,"
            f" {self.flops_per_batch:,} once a batch",
        ]
        for (kind, width, hidden, parameters), some in itertools.groupby(self.replaced, _alike):
            paths = [one.path for one in some]
            place = ", ".join(path or "itself" for path in paths)
            if len(paths) > 2 and not self.left_out:
                place = f"{paths[0]} to {paths[-1]} ({len(paths)})"
            each = "" if len(paths) == 1 else " each"
            lines.append(f"  {place}: {kind}, {width} -> {hidden}, {parameters:,} parameters{each}")
        lines += [f"  left alone: {one.path}, {one.reason}" for one in self.skipped]
        return "\n".join(lines)


def _alike(one: Replaced) -> tuple[str, int, int, int]:
    return one.kind, one.width, one.hidden, one.parameters
