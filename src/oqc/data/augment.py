"""Per-sample augmentation as index arithmetic and masks: static shapes, no host values, the same on every device.

Every function takes uniforms in [0, 1) with one number a sample and can be captured in a CUDA graph.
Letters: B batch, C channels, H and W height and width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def below(u: Tensor, count: int) -> Tensor:
    """Uniforms to whole numbers 0..count-1."""
    return (u * count).long()


def window(images: Tensor, index: Tensor, channels: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Pixels of `images[index]` at `rows` [B, H] and `cols` [B, W]; black (0) where those lie outside the image."""
    H, W = images.shape[-2:]
    pixels = images[
        index[:, None, None, None],
        channels[None, :, None, None],
        rows.clamp(0, H - 1)[:, None, :, None],
        cols.clamp(0, W - 1)[:, None, None, :],
    ]  # [B, C, H, W]
    inside = ((rows >= 0) & (rows < H))[:, None, :, None] & ((cols >= 0) & (cols < W))[:, None, None, :]
    return pixels * inside


def box(y: Tensor, x: Tensor, tall: Tensor | int, wide: Tensor | int, rows: Tensor, cols: Tensor) -> Tensor:
    """True in the `tall` x `wide` box around each centre (y, x) [B], clipped at the border. [B, 1, H, W]"""
    top, left = y - tall // 2, x - wide // 2
    down = (rows >= top[:, None]) & (rows < (top + tall)[:, None])  # [B, H]
    across = (cols >= left[:, None]) & (cols < (left + wide)[:, None])  # [B, W]
    return (down[:, :, None] & across[:, None, :])[:, None]


def symmetric_beta(u: Tensor, v: Tensor, a: float) -> Tensor:
    """Exact Beta(a, a) samples from two uniforms, for any a > 0, without rejection.

    With w = (1-u)^(1/a) and c = cos(2 pi v), t = c sqrt(2a (1/w - 1)) has Student's t distribution with 2a degrees of
    freedom, and (1 + t / sqrt(2a + t^2)) / 2 is Beta(a, a). Computed in float64 so that devices agree in float32.
    """
    w = (1 - u.double()) ** (1 / a)
    c = torch.cos(2 * math.pi * v.double())
    spread = (1 - w) * c**2
    return (1 + c.sign() * (spread / (w + spread)).sqrt()) / 2
