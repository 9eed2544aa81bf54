"""Self-attention on a packed projection: the fused kernel where the sequence is short, PyTorch's elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from oqc.ops.device import on_device_of, on_kernels, wanted

# cuDNN's attention gave NaN gradients in bf16 (docs/deviations.md), so it is never among the choices. Over short
# sequences the memory-efficient kernel is the fastest of the others (docs/performance.md).
SDPA_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
MOST_TOKENS = 128  # beyond it a head's scores no longer fit a program's registers
HEAD_SIZES = (16, 32, 64)


def self_attention(qkv: Tensor, heads: int, *, backend: str = "auto") -> Tensor:
    """softmax(Q K^T / sqrt(d)) V of qkv [B, N, 3 D], head by head: [B, N, D]."""
    if _chosen(qkv, heads, backend):
        return attention(qkv, heads)
    return _plain(qkv, heads)


def attention_in_use(*, tokens: int, size: int, half: bool, backend: str, device: torch.device) -> str:
    """Which attention `self_attention` takes, for a run's record."""
    probe = torch.empty(1, tokens, 3 * size, dtype=torch.bfloat16 if half else torch.float32, device=device)
    if _chosen(probe, 1, backend):
        return "fused kernel"
    order = SDPA_BACKENDS if tokens <= MOST_TOKENS else [SDPA_BACKENDS[1], SDPA_BACKENDS[0], SDPA_BACKENDS[2]]
    return "first of " + ", ".join(choice.name for choice in order) + " that can"


def _chosen(qkv: Tensor, heads: int, backend: str) -> bool:
    """Whether the fused kernel is wanted, and the heads are of a size it has."""
    half = qkv.dtype in (torch.bfloat16, torch.float16)
    fits = half and qkv.shape[-1] // 3 // heads in HEAD_SIZES and qkv.shape[1] <= MOST_TOKENS
    return fits and wanted(backend, qkv)


def _plain(qkv: Tensor, heads: int, *, twice: bool = False) -> Tensor:
    """By PyTorch; `twice`: by its kernel that can be differentiated twice."""
    batch, tokens, packed = qkv.shape
    q, k, v = qkv.view(batch, tokens, 3, heads, packed // 3 // heads).permute(2, 0, 3, 1, 4).unbind(0)
    if qkv.is_cuda or twice:
        choices = [SDPBackend.MATH] if twice else SDPA_BACKENDS
        with sdpa_kernel(choices, set_priority=tokens <= MOST_TOKENS):
            y = F.scaled_dot_product_attention(q, k, v)
    else:
        y = F.scaled_dot_product_attention(q, k, v)
    return y.transpose(1, 2).reshape(batch, tokens, packed // 3)


@torch.library.custom_op("oqc::attention", mutates_args=())
def attention(qkv: Tensor, heads: int) -> Tensor:
    if not on_kernels(qkv):
        return _plain(qkv, heads).clone()
    from oqc.ops import triton_attention

    with on_device_of(qkv):
        return triton_attention.forward(qkv.contiguous(), heads)


@torch.library.custom_op("oqc::attention_backward", mutates_args=())
def _attention_backward(dout: Tensor, qkv: Tensor, heads: int) -> Tensor:
    if not on_kernels(qkv):
        return torch.func.vjp(lambda qkv: _plain(qkv, heads), qkv)[1](dout)[0].clone()
    from oqc.ops import triton_attention

    with on_device_of(qkv):
        return triton_attention.backward(dout.contiguous(), qkv.contiguous(), heads)


@attention.register_fake
def _(qkv: Tensor, heads: int) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)


@_attention_backward.register_fake
def _(dout: Tensor, qkv: Tensor, heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _remember(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.heads = inputs[1]


def _gradient(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
    """By the backward operator or, where that is to be differentiated again, by PyTorch's own attention."""
    (qkv,) = ctx.saved_tensors
    if torch.is_grad_enabled():
        return torch.autograd.grad(_plain(qkv, ctx.heads, twice=True), qkv, dout, create_graph=True)[0], None
    return _attention_backward(dout, qkv, ctx.heads), None


attention.register_autograd(_gradient, setup_context=_remember)
