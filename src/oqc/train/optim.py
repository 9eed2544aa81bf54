"""AdamW with decay on matrices only, and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from oqc.config import Train


def learning_rate(step: Tensor, *, peak: float, warmup: int, total: int) -> Tensor:
    """Linear over the first `warmup` steps up to `peak`, then cosine to 0 at `total`; computed where `step` lives.

    Step t (from 0) of the warmup gets peak (t + 1) / warmup; later ones peak (1 + cos(pi (t - warmup) / rest)) / 2.
    """
    t = step.double()
    rise = (t + 1) / max(warmup, 1)
    fall = (1 + torch.cos(math.pi * (t - warmup) / max(total - warmup, 1))) / 2
    return (peak * torch.where(t < warmup, rise, fall)).float()


def settle(
    lr: Tensor,
    found_inf: Tensor,
    divisor: Tensor | None,
    step: Tensor,
    loss: Tensor,
    norm: Tensor,
    *,
    clip: float,
    peak: float,
    warmup: int,
    total: int,
) -> None:
    """Writes what the fused AdamW kernel reads at this step: the learning rate, 1 in `found_inf` where the loss or the
    gradients' norm is not finite, and in `divisor` what brings a norm above `clip` down to it."""
    lr.copy_(learning_rate(step, peak=peak, warmup=warmup, total=total))
    found_inf.copy_(~(loss.isfinite() & norm.isfinite()))
    if divisor is not None:
        divisor.copy_(((norm + 1e-6) / clip).clamp(min=1))  # the inverse of PyTorch's clip coefficient


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Trainable parameters: matrices and higher decay, vectors and scalars do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("model has no parameter that requires a gradient")
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, config: Train, device: torch.device) -> torch.optim.AdamW:
    """Fused AdamW whose learning rate is a tensor on the device and whose state exists from the start.

    The state is made here rather than at the first step so that it has a fixed address before a graph is captured and
    a fixed layout in checkpoints.
    """
    lr = torch.zeros((), dtype=torch.float32, device=device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=lr,
        betas=config.betas,
        eps=config.adam_eps,
        fused=True,
        capturable=device.type == "cuda",
    )
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
            }
    return optimizer
