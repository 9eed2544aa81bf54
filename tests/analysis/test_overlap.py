import math

import pytest
import torch
from torch import nn

import oqc
from oqc.analysis import chance_level, overlap
from oqc.config import FFN, Model


class Fixed(nn.Module):
    """A model whose intermediates can be worked out by hand: two tokens, one block."""

    def forward(self, x, intermediates):
        assert intermediates
        assert not self.training
        e = torch.eye(3)
        return x, {
            "blocks.0.q": torch.stack([e[0], (e[0] + e[1]) / math.sqrt(2)]),
            "blocks.0.m": torch.stack([e[0], -e[0]]),
            "blocks.0.q_perp": torch.stack([e[1], e[1]]),
            "blocks.0.delta": torch.stack([3 * e[2], e[0] + e[2]]),
            "blocks.0.b": torch.stack([e[0], e[2]]),
            "blocks.0.gate": torch.tensor([[0.2], [0.6]]),
        }


def test_worked_out_by_hand():
    model = Fixed()
    got = overlap(model, [(torch.zeros(1), torch.zeros(1))] * 3)
    assert got["before"] == pytest.approx((1 + 1 / math.sqrt(2)) / 2)
    assert got["after"] == 0
    assert got["hidden_cosine"] == pytest.approx(1 / math.sqrt(2) / 2)
    assert got["gate_mean"] == pytest.approx(0.4)
    assert got["gate_std"] == pytest.approx(0.2)
    assert got["chance"] == pytest.approx(0.5)  # on the sphere in three dimensions |cos| is uniform
    assert model.training


def test_chance_levels():
    assert chance_level(2) == pytest.approx(2 / math.pi)
    assert chance_level(56) == pytest.approx(0.107, abs=5e-4)
    assert chance_level(83) == pytest.approx(0.088, abs=5e-4)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(20000, 24, generator=g), torch.randn(20000, 24, generator=g)
    assert chance_level(24) == pytest.approx(torch.cosine_similarity(x, y).abs().mean().item(), rel=0.02)


@pytest.mark.parametrize(("complement", "absent"), [("none", 6), ("unprojected", 3), ("lowrank", 0)])
def test_on_real_models(complement, absent):
    config = Model(
        image_size=8,
        patch_size=2,
        channels=1,
        width=64,
        depth=2,
        heads=2,
        ffn=FFN(host="mlp", complement=complement, rank=8),
    )
    got = overlap(oqc.create_model(config, seed=0), [(torch.randn(4, 1, 8, 8), torch.zeros(4))])
    assert sum(value is None for value in got.values()) == absent
    if complement == "lowrank":
        assert got["after"] < 1e-6 < got["before"]


def test_what_is_not_finite_is_none():
    config = Model(
        image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, ffn=FFN(complement="lowrank", rank=4)
    )
    model = oqc.create_model(config, seed=0)
    with torch.no_grad():
        model.blocks[1].ffn.complement.lift.weight[0, 0] = math.nan
    got = overlap(model, [(torch.randn(2, 1, 8, 8), torch.zeros(2))])
    assert got["hidden_cosine"] is None
    assert got["before"] > 0
