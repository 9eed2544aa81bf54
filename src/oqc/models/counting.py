"""Parameters and FLOPs of a model, counted without allocating it."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from oqc.config import Model
from oqc.models.deep_vit import DeepViT


def parameters(config: Model) -> int:
    return sum(p.numel() for p in DeepViT(config, device="meta").parameters())


def flops(config: Model, *, backend: str = "torch") -> int:
    """Floating-point operations that one more image adds to a forward pass, a multiply-add counted as two; products
    of weights alone (G and M of the rank-space identity), made once a batch, do not count."""
    model = DeepViT(config, backend=backend, device="meta")
    return _batch_flops(model, 2) - _batch_flops(model, 1)


def _batch_flops(model: DeepViT, batch: int) -> int:
    config = model.config
    images = torch.empty(batch, config.channels, config.image_size, config.image_size, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops()
