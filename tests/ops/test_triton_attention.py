"""The attention kernel against float64, held to PyTorch's own error in the same precision."""

import pytest
import torch

from oqc.ops import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(2, 64, 8, 32), (1, 1, 2, 16), (3, 17, 1, 64), (2, 16, 3, 16), (1, 65, 2, 32), (1, 128, 1, 32)]


def run(function, qkv, dy):
    leaf = qkv.detach().clone().requires_grad_()
    y = function(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, dy.to(y.dtype))[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape, dtype, guards):
    batch, tokens, heads, size = shape
    g = torch.Generator().manual_seed(tokens)
    qkv = torch.randn(batch, tokens, 3 * heads * size, generator=g).to(DEVICE, dtype)
    dy = torch.randn(batch, tokens, heads * size, generator=g).to(DEVICE, dtype)
    want = run(lambda t: attention._plain(t, heads), qkv.double(), dy.double())
    plain = run(lambda t: attention._plain(t, heads), qkv, dy)
    got = run(lambda t: attention.attention(t, heads), qkv, dy)
    guards.check()
    for truth, own, x in zip(want, plain, got, strict=True):
        error, reference = ((t.double() - truth).norm() / truth.norm().clamp_min(1e-12) for t in (x, own))
        assert error <= max(1e-2, 1.25 * reference)
        assert x.dtype == dtype


def test_rows_past_the_last_token_are_not_touched():
    """17 tokens in a block of 32: what lies behind the last row of an image belongs to the next image."""
    qkv = torch.randn(2, 17, 3 * 32, device=DEVICE, dtype=torch.bfloat16)
    alone = attention.attention(qkv[1:].contiguous(), 1)
    assert torch.equal(attention.attention(qkv, 1)[1:], alone)


def test_large_logits_stay_finite():
    qkv = torch.full((1, 16, 3 * 16), 100.0, device=DEVICE, dtype=torch.bfloat16)
    y, gradient = run(lambda t: attention.attention(t, 1), qkv, torch.ones(1, 16, 16, device=DEVICE))
    assert torch.isfinite(y).all()
    assert torch.isfinite(gradient).all()


def test_which_path_is_taken():
    half = torch.zeros(1, 64, 96, dtype=torch.bfloat16, device=DEVICE)
    assert attention._chosen(half, 1, "triton")
    assert not attention._chosen(half, 1, "torch")
    assert not attention._chosen(half.float(), 1, "triton")
    assert not attention._chosen(half, 4, "triton")  # head size 8
    assert not attention._chosen(torch.zeros(1, 129, 96, dtype=torch.bfloat16, device=DEVICE), 1, "triton")


def test_the_operator_trains_where_no_kernel_runs():
    """As where a graph was traced with kernels and is trained without: float64 stands for such a device."""
    qkv, dy = torch.randn(2, 5, 96, dtype=torch.float64, device=DEVICE), torch.randn(2, 5, 32, device=DEVICE)
    got, want = (run(f, qkv, dy) for f in (lambda t: attention.attention(t, 1), lambda t: attention._plain(t, 1)))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_opcheck():
    qkv = torch.randn(2, 16, 96, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    torch.library.opcheck(torch.ops.oqc.attention.default, (qkv, 1), test_utils=("test_schema", "test_faketensor"))


def test_non_contiguous_gradient_and_second_derivative():
    qkv = torch.randn(2, 16, 96, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = attention.attention(qkv, 1)
    (first,) = torch.autograd.grad(y, qkv, torch.ones(16, 2, 32, device=DEVICE, dtype=y.dtype).transpose(0, 1))
    assert torch.isfinite(first).all()
    y = attention.attention(qkv, 1)
    (g,) = torch.autograd.grad(y.float().square().sum(), qkv, create_graph=True)
    (second,) = torch.autograd.grad(g.float().square().sum(), qkv)
    assert torch.isfinite(second).all()
