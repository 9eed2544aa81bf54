"""The kernels between a host's maps and b, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from fused_oracle import DEVICE
from torch import nn

from oqc.ops import activation_name, triton_mix
from oqc.ops.plain import ACTIVATIONS


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_agrees_with_autograd(act: str, gated: bool, power: bool) -> None:
    """Columns of wider buffers, tokens and channels that fill no block, and the gradient of |b|^2."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden = 300, 150
    maps = torch.randn(tokens, 2 * hidden + 5, generator=generator, dtype=torch.float64).mul(3).to(DEVICE)
    db = torch.randn(tokens, hidden + 3, generator=generator, dtype=torch.float64).to(DEVICE)[:, :hidden]
    dpower = torch.randn(tokens, generator=generator, dtype=torch.float64).to(DEVICE) if power else None
    a, c = (maps[:, i * hidden : (i + 1) * hidden].clone().requires_grad_() for i in range(2))
    b = ACTIVATIONS[act](a) * c if gated else ACTIVATIONS[act](a)
    total = (b * db).sum() if dpower is None else (b * db).sum() + (b.square().sum(1) * dpower).sum()
    total.backward()

    single = maps.float()
    left, right = single[:, :hidden], single[:, hidden : 2 * hidden] if gated else None
    out, dmaps = torch.full_like(single, torch.nan), torch.full_like(single, torch.nan)
    triton_mix.forward(left, right, act, out=out[:, :hidden])
    da, dc = dmaps[:, :hidden], dmaps[:, hidden : 2 * hidden] if gated else None
    scale = None if dpower is None else dpower.float()
    sums = triton_mix.backward(db.float(), scale, left, right, act, da=da, dc=dc)
    expected = [a.grad, c.grad] if gated else [a.grad]
    for found, exact in zip([out[:, :hidden], da, dc] if gated else [out[:, :hidden], da], [b, *expected], strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(sums.double(), torch.cat([g.sum(0) for g in expected]), rtol=1e-5, atol=1e-3)
    used = 2 * hidden if gated else hidden
    assert out[:, hidden:].isnan().all()
    assert dmaps[:, used:].isnan().all()


def test_activations_are_known_by_what_they_do() -> None:
    known = {
        "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "silu": nn.SiLU(), "relu": nn.ReLU(inplace=True),
        "sigmoid": nn.Sigmoid(), "identity": nn.Identity(), "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }  # fmt: skip
    assert {name: activation_name(act) for name, act in known.items()} == {name: name for name in known}
    assert set(known) == set(ACTIVATIONS) == set(triton_mix.ACTIVATIONS)
    clipped = nn.Sequential(nn.GELU(), nn.Hardtanh(-10, 10))
    others = (nn.Tanh(), nn.LeakyReLU(), nn.Softmax(-1), nn.Linear(3, 3), nn.RReLU(), nn.PReLU(init=0.0), clipped)
    state = torch.get_rng_state()
    for other in (*others, lambda x: x.transpose(1, 2)):
        assert activation_name(other) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_relu_passes_on_what_is_not_a_number() -> None:
    a, out = torch.tensor([[torch.nan, 1.0, -1.0]], device=DEVICE), torch.empty(1, 3, device=DEVICE)
    triton_mix.forward(a, None, "relu", out=out)
    assert out.isnan().tolist() == [[True, False, False]]
