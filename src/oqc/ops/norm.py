"""The residual sum and the LayerNorm of it: by the fused kernels under autocast, by the module itself elsewhere.

The gradient that comes back along the residual stream and the norm's own meet in one kernel. An operator cannot return
what it was given, and without y the sum is x; so the gradient belongs to a Function around the operators. The kernel
that makes the sum may make the norm too (`ahead`); what it made then has that same gradient (`made`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oqc.ops import plain
from oqc.ops.device import on_device_of, on_kernels, wanted
from oqc.ops.modules import has_hooks

HALF = (torch.bfloat16, torch.float16)
MOST_WIDTH = 2048  # beyond it a row no longer fits a program's registers
MOST_AHEAD = 256  # as wide rows may have room in the kernel that makes the norm of a network's output

Norm = tuple[Tensor, Tensor, float]  # weight, bias, eps


def residual_norm(x: Tensor, y: Tensor | None, norm: nn.Module, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """s = x + y (x itself without y), and norm(s): in autocast's dtype from the kernels, as the norm gives it else."""
    if _chosen(x, y, norm, backend):
        dtype = torch.get_autocast_dtype(x.device.type)
        return _ResidualNorm.apply(x, y, norm.weight, norm.bias, norm.eps, dtype, None, None)[:2]
    s = x if y is None else x + y
    return s, norm(s)


def ahead(x: Tensor, norm: Any, *, backend: str = "auto") -> Norm | None:
    """What of a LayerNorm the kernel that makes such an x needs to make norm(x) too, if there is one that can."""
    if x.shape[-1] > MOST_AHEAD or not _chosen(x, None, norm, backend):
        return None
    return norm.weight, norm.bias, norm.eps


def made(s: Tensor, n: Tensor, stats: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """`residual_norm` of s, where n = norm(s) and its `stats` are there already: its gradient."""
    return _ResidualNorm.apply(s, None, *norm, n.dtype, n.detach(), stats.detach())[:2]


def _chosen(x: Tensor, y: Tensor | None, norm: Any, backend: str) -> bool:
    """Whether the kernels are wanted, the norm is what they compute, and autocast would cast its output anyway."""
    if x.is_meta or not wanted(backend, x) or not torch.is_autocast_enabled(x.device.type):
        return False
    dtype = torch.get_autocast_dtype(x.device.type)
    if type(norm) is not nn.LayerNorm or has_hooks(norm) or dtype not in HALF:
        return False
    for parameter in (norm.weight, norm.bias):  # a sharded or quantised one is of another type
        if type(parameter) not in (Tensor, nn.Parameter) or parameter.dtype != torch.float32:
            return False
    fits = norm.normalized_shape == x.shape[-1:] and x.shape[-1] <= MOST_WIDTH and x.numel() > 0
    if y is not None:
        fits = fits and y.shape == x.shape and y.dtype in (dtype, torch.float32)
    return fits and x.dtype == torch.float32 and x.is_contiguous()


def _plain(s: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(s, s.shape[-1:], weight, bias, eps)


@torch.library.custom_op("oqc::residual_norm", mutates_args=())
def _forward(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """s, empty without y; n; and of each row the mean and 1 / the standard deviation, [2, T]."""
    if not on_kernels(x):
        s = x if y is None else x + y
        n, mean, rstd = torch.native_layer_norm(s, s.shape[-1:], weight, bias, eps)
        return x.new_empty(0) if y is None else s, n.to(dtype), torch.stack([mean.flatten(), rstd.flatten()])
    from oqc.ops import triton_norm

    with on_device_of(x):
        given = (x.contiguous(), None if y is None else y.contiguous(), weight.contiguous(), bias.contiguous())
        found, n, stats = triton_norm.forward(*given, eps, dtype)
    return x.new_empty(0) if found is None else found, n, stats


@torch.library.custom_op("oqc::residual_norm_backward", mutates_args=())
def _backward(
    ds: Tensor | None, dn: Tensor, s: Tensor, stats: Tensor, weight: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx; the same in `dtype`, empty without one; dgamma and dbeta, [2, D]."""
    if not on_kernels(s):
        mean, rstd = (part.view(*s.shape[:-1], 1) for part in stats)
        h, d = (s - mean) * rstd, dn.to(s.dtype)
        g = d * weight
        dx = (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True)) * rstd
        dx = dx if ds is None else dx + ds
        sums = torch.stack([(d * h).flatten(0, -2).sum(0), d.flatten(0, -2).sum(0)])
        return dx, s.new_empty(0) if dtype is None else dx.to(dtype), sums
    from oqc.ops import triton_norm

    with on_device_of(s):
        given = (None if ds is None else ds.contiguous(), dn.contiguous(), s.contiguous(), stats, weight.contiguous())
        dx, found, sums = triton_norm.backward(*given, dtype)
    return dx, s.new_empty(0) if found is None else found, sums


@_forward.register_fake
def _(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    s = x.new_empty(0) if y is None else x.new_empty(x.shape)
    return s, x.new_empty(x.shape, dtype=dtype), x.new_empty(2, x.numel() // x.shape[-1])


@_backward.register_fake
def _(
    ds: Tensor | None, dn: Tensor, s: Tensor, stats: Tensor, weight: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    dy = s.new_empty(0) if dtype is None else s.new_empty(s.shape, dtype=dtype)
    return s.new_empty(s.shape), dy, s.new_empty(2, s.shape[-1])


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        dtype: torch.dtype,
        n: Tensor | None,  # no default: torch 2.11 compiles a Function by the number of its arguments
        stats: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if n is not None and stats is not None:
            return x.view_as(x), n.view_as(n), stats.view_as(stats)
        s, n, stats = _forward(x, y, weight, bias, eps, dtype)
        return x.view_as(x) if y is None else s, n, stats

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, y, weight, bias, ctx.eps, *_ = inputs
        s, _, stats = output
        ctx.save_for_backward(x if y is None else s, stats, weight, bias)
        ctx.dtype = None if y is None else y.dtype
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, dn: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """By the backward operator or, where that is to be differentiated again, by PyTorch's own LayerNorm."""
        s, stats, weight, bias = ctx.saved_tensors
        half = ctx.dtype if ctx.dtype in HALF else None
        dx, dy, dweight, dbias = ds, None, None, None
        if dn is not None and torch.is_grad_enabled():
            given = (s, weight, bias)
            more, dweight, dbias = plain.differentiable_gradients(_plain, dn.to(s.dtype), given, (ctx.eps,))
            dx = more if ds is None or more is None else ds + more
        elif dn is not None:
            dx, dy, (dweight, dbias) = _backward(ds, dn, s, stats, weight, half)
        if half is None or dx is None:
            dy = None if ctx.dtype is None else dx
        elif dy is None:
            dy = dx.to(half)
        return dx, dy, dweight, dbias, None, None, None, None
