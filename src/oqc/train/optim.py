"""AdamW with decay on matrices only, and the learning rate as a function of the step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oqc.config import Train
from oqc.ops.operators import on_device_of, wanted

STATE = ("exp_avg", "exp_avg_sq", "step")  # of a parameter


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


class AdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW, in one launch a group where Triton's kernels are wanted and fit (`ops.triton_adamw`).

    Reads `grad_scale` and `found_inf` as PyTorch's does, but leaves the gradients as they are. The kernels find the
    tensors by a table of addresses. A captured graph writes its own into that, from memory that is kept for it here.
    """

    def __init__(self, *args: Any, backend: str = "auto", **options: Any) -> None:
        super().__init__(*args, **options)
        self.backend = backend
        self._shapes: list[list[int]] = []  # how large what the table is for is, by group
        self._table = torch.empty(0)  # on the device, a row a role
        self._pieces: list[Tensor] = []  # on the device: which program works on what, by group
        self._pinned = torch.empty(0)  # for the next capture
        self._captured: list[Tensor] = []  # what graphs read
        self._written: list[list[int]] | None = None  # what the table holds, between `norm` and the `step` after it

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Of all gradients together."""
        if not self._point():
            return nn.utils.get_total_norm([item[1] for group in self._tensors() for item in group])
        from oqc.ops import triton_adamw

        with on_device_of(self._table):
            parts = [triton_adamw.squares(self._table, pieces) for pieces in self._pieces]
            return torch.cat(parts).sum().sqrt()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        pointed, self._written = closure is None and self._point(), None
        if not pointed:
            return super().step(closure)
        from oqc.ops import triton_adamw

        given: dict[str, Any] = {"divisor": getattr(self, "grad_scale", None)}
        given["found_inf"] = getattr(self, "found_inf", None)
        with on_device_of(self._table):
            for group, pieces in zip(self.param_groups, self._pieces, strict=True):
                own = {"lr": group["lr"], "betas": group["betas"], "eps": group["eps"]}
                triton_adamw.update(self._table, pieces, **own, decay=group["weight_decay"], **given)
            triton_adamw.count_step(self._table, given["found_inf"])
        return None

    def _tensors(self) -> list[list[tuple[Tensor, ...]]]:
        """By group, of each parameter with a gradient, what the table has rows for."""
        return [
            [(p, p.grad, *(self.state[p][name] for name in STATE)) for p in group["params"] if p.grad is not None]
            for group in self.param_groups
        ]

    def _point(self) -> bool:
        """Writes the table. False where PyTorch's own kernels are to run."""
        groups = self._tensors()
        every = [item for group in groups for item in group]
        if not every or not all(self._fits(tensor) for item in every for tensor in item):
            return False
        device, shapes = every[0][0].device, [[item[0].numel() for item in group] for group in groups]
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if shapes != self._shapes:
            if capturing:  # what a graph reads must have come before it
                return False
            self._make_room(shapes, device)
        addresses = [[item[role].data_ptr() for item in every] for role in range(len(every[0]))]
        if addresses == self._written:
            return True
        values = torch.tensor(addresses)
        if capturing:
            if not self._pinned.numel():
                return False
            values, self._pinned = self._pinned.copy_(values), self._pinned.new_empty(0)
            self._captured.append(values)
        elif device.type == "cuda" and not self._pinned.numel():
            self._pinned = torch.empty_like(values, pin_memory=True)
        self._table.copy_(values, non_blocking=True)
        self._written = addresses
        return True

    def _make_room(self, shapes: list[list[int]], device: torch.device) -> None:
        from oqc.ops import triton_adamw

        count = sum(map(len, shapes))
        self._shapes, self._pinned = shapes, torch.empty(0)
        self._table = torch.zeros(2 + len(STATE), count, dtype=torch.int64, device=device)
        first = itertools.accumulate(map(len, shapes), initial=0)
        pieces = [triton_adamw.pieces(sizes, start) for sizes, start in zip(shapes, first, strict=False)]
        self._pieces = [torch.tensor(one, dtype=torch.int64, device=device).view(-1, 3) for one in pieces]

    def _fits(self, x: Tensor) -> bool:
        plain = type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.is_contiguous()
        return plain and wanted(self.backend, x)


def make_optimizer(model: nn.Module, config: Train, device: torch.device) -> AdamW:
    """AdamW whose learning rate is a tensor on the device and whose state exists from the start.

    The state is made here rather than at the first step so that it has a fixed address before a graph is captured and
    a fixed layout in checkpoints.
    """
    lr = torch.zeros((), dtype=torch.float32, device=device)
    optimizer = AdamW(
        parameter_groups(model, config.weight_decay),
        backend=config.backend,
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
