"""Sums over tokens: that no token is lost, whatever their number."""

import pytest
import torch

from oqc.ops.products import over_tokens

COUNTS = [0, 1, 63, 64, 65, 128, 191, 1000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("tokens", COUNTS)
def test_is_the_product(tokens, full, dtype):
    generator = torch.Generator().manual_seed(tokens)
    a, b = (torch.randn(tokens, n, generator=generator).to(dtype) for n in (5, 7))
    exact = a.double().T @ b.double()
    found = over_tokens(a, b, full=full)
    assert found.dtype == (torch.float32 if full else dtype)
    error = 1e-2 if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=error, atol=error * max(1, tokens) ** 0.5)
    if full:
        out = torch.full((5, 9), torch.nan)
        over_tokens(a, b, out=out[:, 1:8])
        torch.testing.assert_close(out[:, 1:8], found)
        assert out[:, [0, 8]].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(384, 736), (448, 768), (256, 664), (1440, 256)], ids=str)
def test_no_token_is_lost(sizes):
    """Of ones, every entry is the number of tokens: fp32 has room for that."""
    a, b = (torch.ones(8400, n, device="cuda", dtype=torch.bfloat16) for n in sizes)
    for tokens in [*range(4161, 4290), 65, 2561, 8193, 8385]:
        assert (over_tokens(a[:tokens], b[:tokens]) == tokens).all(), tokens
