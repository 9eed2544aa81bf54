"""The moving average of a model's weights."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn


class Average:
    """Exponential moving average of the weights, with a model that reads it.

    The average is one flat tensor, so that keeping it untouched after a non-finite step is one `where`.
    """

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.decay, self.sources = decay, list(parameters.values())
        self.flat = self._gather()
        ends = list(itertools.accumulate(p.numel() for p in self.sources))
        self.parts = {
            name: self.flat[end - p.numel() : end].view(p.shape)
            for (name, p), end in zip(parameters.items(), ends, strict=True)
        }
        self.model = copy.deepcopy(model).eval()
        for name, p in self.model.named_parameters():
            if name in self.parts:
                p.data = self.parts[name]
        for mine, live in zip(self.model.modules(), model.modules(), strict=True):
            mine._buffers = live._buffers

    def _gather(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.sources])

    def update(self, finite: Tensor) -> None:
        self.flat.copy_(torch.where(finite, self.flat.lerp(self._gather(), 1 - self.decay), self.flat))
