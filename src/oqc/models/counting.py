"""Parameters and FLOPs of a model, counted without allocating it."""

from __future__ import annotations

import torch

from oqc.config import Model
from oqc.models.deep_vit import DeepViT
from oqc.nn import KINDS, OQCFFN

ITEM = 2  # bytes of a number that is read or written


def parameters(config: Model) -> int:
    return sum(p.numel() for p in DeepViT(config, device="meta").parameters())


def flops(config: Model) -> int:
    """Floating-point operations that one more image adds to a forward pass, a multiply-add counted as two; products
    of weights alone (G and M of the rank-space identity), made once a batch, do not count."""
    model = DeepViT(config, backend="torch", device="meta")
    return _batch_flops(model, 2) - _batch_flops(model, 1)


def _batch_flops(model: DeepViT, batch: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode  # imports triton where there is one

    config = model.config
    images = torch.empty(batch, config.channels, config.image_size, config.image_size, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops()


def floor_seconds(config: Model, batch: int, *, training: bool, flops_per_s: float, bytes_per_s: float) -> float:
    """No step can be faster than this: each product and each pass over a tensor at the device's rates, every tensor
    that must be read or written moved once, in items of `ITEM` bytes; the fused forms of the branch and of AFBO.

    Training counts two products in the backward for each in the forward, the passes of the forward twice more, and
    AdamW's seven passes over float32 parameters.
    """
    ffn, tokens, D = config.ffn, batch * (config.image_size // config.patch_size) ** 2, config.width
    block = DeepViT(config, device="meta").blocks[0].ffn
    assert isinstance(block, OQCFFN)
    H = block.host.fc2.in_features
    maps = {"mlp": 1}.get(ffn.host, 2)
    R = ffn.rank if ffn.complement != "none" else 0
    kind = KINDS[ffn.complement] if R else None
    branch = 0 if kind is None or kind.shared else 2 * R
    seen = R if kind is not None and kind.space != "none" else 0  # P b, or O^T b for full
    products = [  # (columns, inner): [tokens, inner] times [inner, columns]
        (3 * D, D),
        (D, D),
        (maps * H + branch, D),
        (D + seen, H),
        *([(D, R)] if R else []),
    ]
    patches = tokens // batch
    passes = [4 * D, 4 * D, (maps + 1) * H, 4 * D]  # items a token: two norms with residual, the mixing, attention
    attention_flops = 4 * tokens * patches * D
    times = 3 if training else 1
    seconds = sum(
        times * max(2 * tokens * n * k / flops_per_s, ITEM * (tokens * (n + k) + n * k) / bytes_per_s)
        for n, k in products
    )
    seconds += times * attention_flops / flops_per_s
    seconds += times * ITEM * tokens * sum(passes) / bytes_per_s
    seconds *= config.depth
    if training:
        seconds += 7 * 4 * parameters(config) / bytes_per_s
    return seconds
