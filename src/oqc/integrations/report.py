"""What an injection did, as data and as text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oqc.integrations.finding import Skipped
from oqc.nn import Complement


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """One feed-forward network that got a complement."""

    path: str
    kind: str
    width: int
    hidden: int
    parameters: int  # added
    flops: int  # added for one token, a multiply-add counted as two

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
        )


def _token_flops(branch: Complement, width: int, hidden: int) -> int:
    """Matrix products of the rank-space form that every token needs; those of weights alone are made once a batch."""
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

    def measured(self, model: nn.Module, example: Tensor) -> Report:
        """With FLOPs an image: each network's own, times the tokens that it sees of the example."""
        total = 0
        handles = []
        for one in self.replaced:

            def count(_: nn.Module, args: tuple[Tensor, ...], one: Replaced = one) -> None:
                nonlocal total
                total += args[0].numel() // one.width * one.flops

            handles.append(model.get_submodule(one.path).register_forward_pre_hook(count))
        training = model.training
        try:
            with torch.no_grad():
                model.eval()(example)
        finally:
            model.train(training)
            for handle in handles:
                handle.remove()
        return dataclasses.replace(self, flops_per_image=total // example.shape[0])

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.complement} complement, rank {self.rank}, in {len(self.replaced)} of"
            f" {len(self.replaced) + self.left_out} feed-forward networks; {self.parameters:,} parameters and"
            f" {self.flops_per_token:,} FLOPs a token added"
        ]
        if self.flops_per_image is not None:
            lines[0] += f", {self.flops_per_image:,} FLOPs an image"
        lines += [
            f"  {one.path}: {one.kind}, {one.width} -> {one.hidden}, {one.parameters:,} parameters"
            for one in self.replaced
        ]
        lines += [f"  left alone: {one.path}, {one.reason}" for one in self.skipped]
        return "\n".join(lines)
