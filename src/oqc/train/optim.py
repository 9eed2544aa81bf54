"""AdamW with decay on matrices only, and the learning rate as a function of the step."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from oqc.config import Train
from oqc.ops.device import on_device_of, wanted

STATE = ("exp_avg", "exp_avg_sq", "step")  # of a parameter
ROLES = 2 + len(STATE)  # rows of the table: gradients, parameters, then those
_state, _layout, _dtype = itemgetter(*STATE), attrgetter("layout"), attrgetter("dtype")


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

    Reads `grad_scale` and `found_inf` as PyTorch's does, but leaves the gradients as they are.
    """

    def __init__(self, *args: Any, backend: str = "auto", **options: Any) -> None:
        super().__init__(*args, **options)
        self.backend = backend
        self._tables: dict[Any, _Table] = {}  # by device and sizes; never dropped, since a graph may read one

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_tables", {})  # a copy has none; load_state_dict comes here too, and drops none

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Of all gradients together."""
        table = self._point(gradients_only=True)
        if table is None:
            found = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            return nn.utils.get_total_norm(found)
        from oqc.ops import triton_adamw

        with on_device_of(table.addresses):
            parts = [triton_adamw.squares(table.addresses, pieces) for pieces in table.pieces]
            return torch.cat(parts).sum().sqrt()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        table = self._point() if closure is None else None
        if table is None:  # without the hooks that any other AdamW has put around it: they run around this one
            inner: Any = torch.optim.AdamW.step
            return (inner.__wrapped__ if getattr(inner, "hooked", False) else inner)(self, closure)
        from oqc.ops import triton_adamw

        given: dict[str, Any] = {"divisor": getattr(self, "grad_scale", None)}
        given["found_inf"] = getattr(self, "found_inf", None)
        with on_device_of(table.addresses):
            for group, pieces in zip(self.param_groups, table.pieces, strict=True):
                own = {"lr": group["lr"], "betas": group["betas"], "eps": group["eps"]}
                triton_adamw.update(table.addresses, pieces, **own, decay=group["weight_decay"], **given)
            triton_adamw.count_step(table.addresses, given["found_inf"])
        table.held = None
        return None

    def _point(self, *, gradients_only: bool = False) -> _Table | None:
        """The table with the addresses of now, or only the gradients'. None where PyTorch's own kernels are to run.

        Nothing is remembered, since any tensor may have been replaced; what all are asked at every step is asked in C.
        """
        groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        every = list(itertools.chain(*groups))
        rows: list[Sequence[Tensor]] = [[p.grad for p in every]]
        if not every or not wanted(self.backend, rows[0][0]):
            return None
        device = rows[0][0].device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or not gradients_only:  # a graph fills its table once
            found = map(self.state.get, every, itertools.repeat({}))
            try:
                rows += [every, *zip(*map(_state, found), strict=True)]
            except KeyError:
                return None
        if not all(_is_usual(group, device) for group in self.param_groups) or not _are_flat(rows):
            return None
        key = (device, tuple(map(len, groups)), tuple(map(Tensor.numel, rows[0])))
        table = self._tables.get(key)
        if table is None and not capturing:  # what a graph reads must have come before it
            table = self._tables[key] = _Table(*key)
        return table if table is not None and table.write(rows, capturing) else None


class _Table:
    """Where the kernels find tensors of some sizes, and which program works on what.

    A captured graph writes its own addresses into the table, from pinned memory that is kept for it.
    """

    def __init__(self, device: torch.device, groups: Sequence[int], sizes: Sequence[int]) -> None:
        from oqc.ops import triton_adamw

        self.addresses = torch.zeros(ROLES, len(sizes), dtype=torch.int64, device=device)
        bounds = itertools.pairwise(itertools.accumulate(groups, initial=0))
        pieces = [triton_adamw.pieces(sizes[start:stop], start) for start, stop in bounds]
        self.pieces = [torch.tensor(one, dtype=torch.int64, device=device).view(-1, 3) for one in pieces]
        self.held: array[int] | None = None  # what the capture under way has written
        self.spare: Tensor | None = None  # pinned, for the next capture
        self.captured: list[Tensor] = []  # pinned, which graphs read

    def write(self, rows: Sequence[Sequence[Tensor]], capturing: bool) -> bool:
        """Whether the first rows are these now: not in a capture for which no memory was put aside."""
        addresses = array("q", [*map(Tensor.data_ptr, itertools.chain(*rows))])
        values = torch.frombuffer(addresses, dtype=torch.int64).view(len(rows), -1)
        if not capturing:
            self.held = None
            if self.addresses.is_cuda and self.spare is None:
                self.spare = torch.empty(self.addresses.shape, dtype=torch.int64, pin_memory=True)
        elif addresses == self.held:
            return True
        elif self.spare is None:
            return False
        else:
            values = self.spare.copy_(values)
            self.captured.append(values)
            self.held, self.spare = addresses, None
        self.addresses[: len(rows)].copy_(values, non_blocking=True)
        return True


def _is_usual(group: dict[str, Any], device: torch.device) -> bool:
    """Whether a group asks for nothing that the kernels do not have."""
    lr = group["lr"]
    plain = isinstance(lr, Tensor) and lr.device == device and lr.dtype == torch.float32
    numbers = (*group["betas"], group["eps"], group["weight_decay"])
    unusual = group["amsgrad"] or group["maximize"] or group["differentiable"]
    return plain and not unusual and all(isinstance(one, (int, float)) for one in numbers)


def _are_flat(rows: Sequence[Sequence[Tensor]]) -> bool:
    """Whether tensors can be taken by their addresses alone, those of a parameter being of one size (but its step)."""
    tensors = list(itertools.chain(*rows))
    return (
        set(map(type, tensors)) <= {Tensor, nn.Parameter}
        and set(map(_layout, rows[0])) == {torch.strided}  # of an embedding's gradient: nothing else is sparse
        and set(map(_dtype, tensors)) == {torch.float32}
        and len(set(map(Tensor.get_device, tensors))) == 1
        and all(map(Tensor.is_contiguous, tensors))
        and len({tuple(map(Tensor.numel, row)) for row in rows[:-1]}) <= 1
    )


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
