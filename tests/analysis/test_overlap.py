import math

import pytest
import timm
import torch
from torch import nn

import oqc
from oqc.analysis import chance_level, overlap
from oqc.analysis.overlap import OverlapSums
from oqc.config import FFN, Model


def test_worked_out_by_hand():
    """Two tokens, one block, three times."""
    e, sums = torch.eye(3), OverlapSums()
    for _ in range(3):
        sums.add(
            {
                "blocks.0.q": torch.stack([e[0], (e[0] + e[1]) / math.sqrt(2)]),
                "blocks.0.m": torch.stack([e[0], -e[0]]),
                "blocks.0.q_perp": torch.stack([e[1], e[1]]),
                "blocks.0.delta": torch.stack([3 * e[2], e[0] + e[2]]),
                "blocks.0.b": torch.stack([e[0], e[2]]),
                "blocks.0.gate": torch.tensor([[0.2], [0.6]]),
            }
        )
    got = sums.means()
    assert got["before"] == pytest.approx((1 + 1 / math.sqrt(2)) / 2)
    assert got["after"] == 0
    assert got["hidden_cosine"] == pytest.approx(1 / math.sqrt(2) / 2)
    assert got["gate_mean"] == pytest.approx(0.4)
    assert got["gate_std"] == got["gate_token_std"] == pytest.approx(0.2)
    assert got["chance"] == pytest.approx(0.5)  # on the sphere in three dimensions |cos| is uniform


def test_the_gates_spread_over_tokens_leaves_out_what_blocks_differ_by():
    """Two tokens, two blocks: one gate varies over tokens by 0.1, the other not; their means are 0.2 and 0.6."""
    sums, part = OverlapSums(), torch.ones(2, 3)
    for first, second in ((0.1, 0.3), (0.3, 0.1)):
        gates = {"a.": torch.tensor([[first], [second]]), "b.": torch.tensor([[0.6], [0.6]])}
        sums.add({p + name: part for p in gates for name in ("delta", "b")} | {f"{p}gate": g for p, g in gates.items()})
    got = sums.means()
    assert got["gate_mean"] == pytest.approx(0.4)
    assert got["gate_token_std"] == pytest.approx(math.sqrt(0.1**2 / 2))
    assert got["gate_std"] == pytest.approx(math.sqrt(0.1**2 / 2 + 0.2**2))


def test_chance_levels():
    assert chance_level(2) == pytest.approx(2 / math.pi)
    assert chance_level(56) == pytest.approx(0.107, abs=5e-4)
    assert chance_level(83) == pytest.approx(0.088, abs=5e-4)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(20000, 24, generator=g), torch.randn(20000, 24, generator=g)
    assert chance_level(24) == pytest.approx(torch.cosine_similarity(x, y).abs().mean().item(), rel=0.02)


@pytest.mark.parametrize(("complement", "absent"), [("unprojected", 3), ("lowrank", 0)])
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
        assert got["gate_token_std"] == 0  # one number a block


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


def small_vit(**options):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}
    model = timm.models.VisionTransformer(**sizes)
    return model, oqc.inject(model, init="paper", rank=8, seed=0, **options)


@pytest.mark.parametrize("complement", ["lowrank", "full", "dynamic"])
def test_an_injected_model_by_block(complement):
    model, _ = small_vit(complement=complement)
    data = [(torch.randn(4, 3, 32, 32), torch.zeros(4)), (torch.randn(2, 3, 32, 32), torch.zeros(2))]
    model.train()
    whole, blocks = overlap(model, data), overlap(model, data, by_block=True)
    assert model.training
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert list(blocks) == [f"blocks.{i}.mlp" for i in range(3)]
    assert whole["after"] < 1e-6 < whole["before"]
    for name in ("before", "hidden_cosine", "gate_mean"):  # every block has as many tokens
        assert whole[name] == pytest.approx(sum(one[name] for one in blocks.values()) / 3)
    gates = torch.sigmoid(torch.tensor([-2.0])).item()
    assert blocks["blocks.1.mlp"]["gate_mean"] == pytest.approx(gates, abs=1e-5)


def test_what_a_network_adds_is_what_its_intermediates_say():
    model, _ = small_vit(complement="lowrank")
    network, x = model.blocks[1].mlp, torch.randn(2, 17, 32)
    y, named = network.intermediates(x)
    torch.testing.assert_close(y, network(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(y, network.fc2(named["h"]))
    torch.testing.assert_close(named["h"], named["b"] + named["gate"] * named["delta"])
    torch.testing.assert_close(named["b"], network.act(network.fc1(x)))


def test_batches_of_any_form():
    model, _ = small_vit(complement="lowrank")
    x = torch.randn(2, 3, 32, 32)
    assert overlap(model, [x]) == overlap(model, [[x, 1]]) == overlap(model, [{"x": x}])
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    assert overlap(compiled, [x]) == overlap(model, [x])


def test_what_are_no_batches_is_named():
    for batches in (None, 5):
        with pytest.raises(ValueError, match=rf"^batches must be several, .* list, got {type(batches).__name__}$"):
            overlap(torch.nn.Identity(), batches)


def test_a_complement_that_nothing_reaches_is_an_error():
    model, _ = small_vit(complement="lowrank")
    with pytest.raises(ValueError, match=r"batches must reach every complement, but none came to 'blocks.0.mlp'"):
        overlap(model, [])


@pytest.mark.parametrize("by_block", [False, True])
def test_a_model_without_a_complement_is_an_error(by_block):
    with pytest.raises(ValueError, match=r"Identity has no complement to measure; call oqc.inject\(model\) first"):
        overlap(nn.Identity(), [torch.zeros(1)], by_block=by_block)


@pytest.mark.parametrize(
    ("batch", "got"), [("a", "str"), (3, "int"), ([], "list"), (["a", 1], "list that begins with str")]
)
def test_a_batch_that_is_no_input_is_named(batch, got):
    model, _ = small_vit(complement="lowrank")
    allowed = "batches must hold tensors, tuples or lists that begin with one, or dicts of keyword arguments"
    with pytest.raises(ValueError, match=f"^{allowed}, got {got}$"):
        overlap(model, [batch])
