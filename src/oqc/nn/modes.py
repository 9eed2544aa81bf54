"""Evaluation for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; the mode of each of its modules is as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(modes[0][1])  # by its own method, which may do more than set the flags
        for module, training in modes:
            module.training = training
