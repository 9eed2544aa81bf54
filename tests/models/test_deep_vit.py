import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import oqc
from oqc.config import FFN, HOSTS, Model
from oqc.models import counting, registry
from oqc.models.deep_vit import Block
from oqc.nn import KINDS
from oqc.ops import norm

TINY = Model(image_size=8, patch_size=2, channels=1, num_classes=5, width=16, depth=3, heads=4, ffn=FFN(rank=4))
PUBLISHED = {  # millions, tables 1 and 2
    "deep_vit_afbo": 6.37,
    "deep_vit_afbo_full_r64": 6.97,
    "deep_vit_afbo_lowrank_r56": 7.19,
    "deep_vit_afbo_static_r83": 7.59,
    "deep_vit_afbo_dynamic_r83": 7.59,
    "deep_vit_afbo_64px": 6.43,
    "deep_vit_afbo_full_r64_64px": 7.03,
    "deep_vit_afbo_lowrank_r56_64px": 7.25,
    "deep_vit_afbo_static_r83_64px": 7.65,
    "deep_vit_afbo_dynamic_r83_64px": 7.65,
}


def tiny(complement="none", host="afbo", **options):
    return oqc.create_model(TINY, seed=0, complement=complement, host=host, **options)


def test_published_parameter_counts():
    assert list(PUBLISHED) == registry.PAPER
    counts = {name: round(counting.parameters(registry.MODELS[name]) / 1e6, 2) for name in PUBLISHED}
    assert counts == PUBLISHED


def test_counting_without_allocating_agrees_with_a_real_model():
    name = "deep_vit_afbo_lowrank_r56"
    model = oqc.create_model(name, depth=2)
    assert sum(p.numel() for p in model.parameters()) == counting.parameters(model.config)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_images_give_no_logits(backend):
    model = tiny("lowrank", backend=backend)
    images = torch.randn(0, 1, 8, 8)
    logits = model(images)
    assert logits.shape == (0, model.config.num_classes)
    logits.sum().backward()
    assert model(images, intermediates=True)[0].shape == logits.shape


def test_patches_are_cut_row_by_row():
    model = tiny()
    x = torch.randn(2, 1, 8, 8)
    patch = x[:, :, 2:4, :2].flatten(1)  # the first of the second row, in which there are four
    expected = model.patch_embed(patch) + model.pos_embed[:, 4]
    torch.testing.assert_close(model.embed(x)[:, 4], expected, rtol=1e-5, atol=1e-6)


def test_flops_of_a_linear_part():
    """One more MLP block costs its products and its attention."""
    base = Model(ffn=FFN(host="mlp"))
    one = counting.flops(dataclasses.replace(base, depth=3)) - counting.flops(dataclasses.replace(base, depth=2))
    tokens, width = 64, 256
    assert one == 2 * tokens * (4 * width**2 + 2 * width * 1024) + 2 * 2 * tokens**2 * width


@pytest.mark.parametrize("complement", ["lowrank", "full"])  # full has no P b, but an O^T b
@pytest.mark.parametrize("host", ["mlp", "afbo"])
def test_flops_of_a_complement(host, complement):
    """What the report of an injection says of a token, in a block and without weights at hand."""
    plain, other = (Model(depth=2, ffn=FFN(host=host, complement=c, rank=56)) for c in ("none", complement))
    width, hidden, rank = 256, counting.DeepViT(other, device="meta").blocks[0].ffn.hidden_features, 56
    token = 2 * (2 * width * rank + hidden * rank + rank * rank + rank * width)
    assert counting.flops(other) - counting.flops(plain) == 2 * 64 * token


@pytest.mark.parametrize("host", HOSTS)
def test_host_weights_are_the_same_for_every_complement(host):
    plain = tiny(host=host).state_dict()
    for complement in KINDS:
        other = tiny(complement, host).state_dict()
        assert set(plain) <= set(other)
        assert all(torch.equal(plain[name], other[name]) for name in plain), complement
        assert len(other) > len(plain)


def test_blocks_start_differently_and_seeds_differ():
    model, other = tiny("lowrank"), oqc.create_model(TINY, seed=1, complement="lowrank")
    for name in ("ffn.host.map_a.weight", "ffn.complement.u.weight"):
        first, second = (block.state_dict()[name] for block in model.blocks[:2])
        assert not torch.equal(first, second)
        assert not torch.equal(first, other.blocks[0].state_dict()[name])


def test_without_a_seed_pytorchs_generator_decides():
    def draw(seed):
        torch.manual_seed(seed)
        return oqc.create_model(TINY).pos_embed

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_intermediates_are_named_and_the_same_function():
    model = tiny("dynamic").double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    logits, named = model(x, intermediates=True)
    assert torch.allclose(logits, model(x), atol=1e-12)
    parts = ("b", "q", "m", "q_perp", "delta", "gate", "h")
    assert set(named) == {f"blocks.{i}.{p}" for i in range(3) for p in parts} | {"features"}
    assert named["blocks.1.q"].shape == (2, 16, 4)
    assert torch.allclose(model.head(named["features"]), logits)


def test_readout_uses_the_last_two_blocks():
    model = tiny().double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    states = [model.embed(x)]
    for block in model.blocks:
        states.append(block(states[-1]))
    with torch.no_grad():
        model.readout.gamma.fill_(1.2)
    z = states[-1] + torch.sigmoid(torch.tensor(1.2)).double() * states[-2]
    assert torch.allclose(model(x), model.head(model.norm(z).mean(1)), atol=1e-6)


def test_patches_hold_the_pixels_of_their_place():
    model = tiny()
    x = torch.zeros(1, 1, 8, 8)
    x[0, 0, 2, 5] = 1  # row 1, column 2 of the 4 x 4 grid of patches
    tokens = model.embed(x) - model.embed(torch.zeros(1, 1, 8, 8))
    assert tokens[0].abs().sum(-1).nonzero().flatten().tolist() == [1 * 4 + 2]


def test_features_only_and_odd_channels():
    model = oqc.create_model(TINY, num_classes=0, channels=5)
    assert model(torch.randn(2, 5, 8, 8)).shape == (2, 16)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_block_of_ones_own_need_not_take_more_than_it_did(ahead, monkeypatch):
    class Mine(Block):
        def forward(self, x, folded=None):
            return super().forward(x, folded)

    monkeypatch.setattr(norm, "MOST_AHEAD", 256 * ahead)
    model, x = tiny("lowrank", backend="triton"), torch.randn(1, 1, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(x)
        model.blocks[1].__class__ = Mine
        assert torch.allclose(model(x), before, atol=1e-3)


def test_a_checkpoint_loads_under_either_backend():
    state = tiny("full").state_dict()
    oqc.create_model(TINY, complement="full", backend="reference").load_state_dict(state, strict=True)


def test_names_and_overrides():
    assert "deep_vit_afbo_lowrank_r56" in oqc.list_models()
    assert set(oqc.list_models("*_64px")) == {n for n in PUBLISHED if n.endswith("64px")}
    model = oqc.create_model("deep_vit_afbo_lowrank_r56", num_classes=10, depth=2, rank=32)
    assert (model.config.num_classes, model.config.ffn.rank, len(model.blocks)) == (10, 32, 2)
    assert oqc.create_model("vit_tiny_pr", depth=2).readout is not None
    assert oqc.create_model("vit_tiny", depth=2).readout is None
    assert sum(p.numel() for p in oqc.create_model("vit_tiny").parameters()) == pytest.approx(5.4e6, rel=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: oqc.create_model("deep_vit_afbo_lowrnk_r56"),
            "unknown model .*did you mean 'deep_vit_afbo_lowrank_r56'",
        ),
        (lambda: oqc.create_model("deep_vit_afbo", rnk=3), "unknown argument 'rnk'; did you mean 'rank'"),
        (lambda: oqc.create_model(TINY, heads=3), "heads must divide width, got heads 3 with width 16"),
        (lambda: oqc.create_model(TINY, image_size=9), "image_size must be a multiple of patch_size, got image_size 9"),
        (lambda: oqc.create_model(TINY, complement="lowrank", rank=0), "rank must be at least 1, got 0"),
        (
            lambda: oqc.create_model(TINY, complement="lowrank", rank=4000),
            "rank must be from 1 to the hidden width .*4000",
        ),
        (lambda: oqc.create_model(TINY, host="mpl"), "host must be one of .*'mpl'; did you mean 'mlp'"),
        (lambda: oqc.create_model(TINY, complement="ful"), "'ful'; did you mean 'full'"),
        (lambda: oqc.create_model(TINY, depth=1), "readout needs a depth of at least 2, got depth 1"),
        (lambda: oqc.create_model(TINY, complement="lowrank", rank=4.0), "rank must be a whole number, got 4.0"),
        (lambda: oqc.create_model(TINY, num_classes=10.0), "num_classes must be a whole number, got 10.0"),
        (
            lambda: oqc.create_model(TINY, dtype="float32"),
            "dtype must be a torch.dtype of floating point, got 'float32'",
        ),
        (lambda: tiny()(torch.randn(2, 1, 8, 9)), r"the input must be \[B, 1, 8, 8\], got \[2, 1, 8, 9\]"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numpys_numbers_are_taken():
    options = {"complement": "lowrank", "rank": np.int64(4), "num_classes": np.int32(5), "eps": np.float32(1e-6)}
    config = oqc.create_model(TINY, **options).config
    assert (type(config.ffn.rank), type(config.num_classes), type(config.ffn.eps)) == (int, int, float)


def test_built_on_the_meta_device():
    with torch.device("meta"):
        model = oqc.create_model("deep_vit_mlp_full_r64")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_weights_are_started_off_the_meta_device_as_they_would_have_been():
    model = oqc.create_model(TINY, complement="dynamic", device="meta").to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    model.init_weights(3)
    want = oqc.create_model(TINY, complement="dynamic", seed=3).state_dict()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    torch.manual_seed(0)
    model.init_weights()
    torch.manual_seed(0)
    assert torch.equal(model.pos_embed, oqc.create_model(TINY, complement="dynamic").pos_embed)
