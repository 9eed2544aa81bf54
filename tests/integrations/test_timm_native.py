"""timm's own doors: mlp_layer, pretrained weights, and Deep-ViT in the registry."""

import warnings

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

import oqc
import oqc.integrations.timm
from oqc.nn.ffn import mlp_layer

SMALL = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2}
DEEP = {"depth": 3, "width": 32, "heads": 2, "hidden": 48}
X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A "pretrained" timm model and the file of its weights."""
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", **SMALL).eval()
    path = tmp_path_factory.mktemp("timm") / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    return model, path


def pretrained(path, **options):
    overlay = {"file": str(path), "custom_load": False}
    return timm.create_model(
        "vit_small_patch16_224", pretrained=True, pretrained_cfg_overlay=overlay, **SMALL, **options
    ).eval()


@pytest.mark.parametrize("complement", ["lowrank", "full", "static", "dynamic"])
@torch.no_grad()
def test_pretrained_weights_load_strictly(checkpoint, complement):
    plain, path = checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = pretrained(path, mlp_layer=mlp_layer(complement, rank=8, init="identity"))
    assert isinstance(model.blocks[0].mlp, oqc.OQCFFN)
    assert torch.equal(model(X), plain(X))
    with pytest.warns(UserWarning, match=r'holds nothing of a complement.*init="identity"'):
        paper = pretrained(path, mlp_layer=mlp_layer(complement, rank=8))
    assert not torch.allclose(paper(X), plain(X), atol=1e-6)
    assert torch.equal(paper.blocks[1].mlp.host.fc2.weight, plain.blocks[1].mlp.fc2.weight)


def test_wrong_checkpoints_are_still_errors(checkpoint):
    plain, _ = checkpoint
    model = timm.create_model("vit_small_patch16_224", mlp_layer=mlp_layer(rank=8), **SMALL)
    state = dict(plain.state_dict())
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.0.mlp.host.fc2.bias"):
        model.load_state_dict({k: v for k, v in state.items() if k != "blocks.0.mlp.fc2.bias"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks.0.mlp.fc3.weight"):
        model.load_state_dict(state | {"blocks.0.mlp.fc3.weight": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.0.mlp.complement"):
        model.load_state_dict(state | {"blocks.0.mlp.complement.beta": torch.zeros(1)})


def test_weights_of_1x1_convolutions():
    conv = timm.layers.Mlp(16, 32, use_conv=True)
    ours = oqc.OQCFFN(16, 32, use_conv=True, rank=4, init="identity")
    ours.load_state_dict(conv.state_dict())
    x = torch.randn(2, 16, 4, 4)
    assert torch.allclose(ours(x), conv(x), atol=1e-6)


def test_gated_host_takes_timms_swiglu():
    torch.manual_seed(0)
    plain = timm.layers.SwiGLU(16, 32, norm_layer=nn.LayerNorm)
    ours = oqc.OQCFFN(16, 32, host="swiglu", norm_layer=nn.LayerNorm, rank=4, init="identity")
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 16)
    assert torch.equal(ours(x), plain(x))


def test_mistakes_show_where_mlp_layer_is_called():
    with pytest.raises(ValueError, match="did you mean 'lowrank'"):
        mlp_layer("low_rank")
    with pytest.raises(ValueError, match="rank must be a whole number from 1 on, got 0"):
        mlp_layer(rank=0)
    with pytest.raises(ValueError, match="groups must be a whole number from 1 on, got 0"):
        mlp_layer(host="afbo", groups=0)
    mlp_layer("none", rank=0)
    mlp_layer(rank=7, host="afbo", groups=4)


@torch.no_grad()
def test_deep_vit_is_registered():
    assert set(oqc.list_models()) <= set(timm.list_models())
    model = timm.create_model("deep_vit_afbo_lowrank_r56", num_classes=7, rank=8, seed=3, **DEEP).eval()
    ours = oqc.create_model("deep_vit_afbo_lowrank_r56", num_classes=7, rank=8, seed=3, **DEEP)
    assert torch.allclose(model(X), ours(X), atol=1e-6)
    assert list(model.state_dict()) == list(ours.state_dict())
    assert model.forward_features(X).shape == (2, 64, 32)
    assert torch.equal(model.forward_head(model.forward_features(X)), model(X))
    assert timm.data.resolve_data_config(model=model)["input_size"] == (3, 32, 32)


@pytest.mark.parametrize("channels", [1, 3, 4])
@torch.no_grad()
def test_pretrained_deep_vit_with_other_channels(channels, tmp_path, caplog):
    """The patch embedding is brought to them as that of a plain ViT, which is a convolution."""
    plain = timm.create_model("deep_vit_afbo_lowrank_r56", rank=8, seed=3, **DEEP)
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "model.safetensors")
    overlay = {"file": str(tmp_path / "model.safetensors"), "custom_load": False}
    model = timm.create_model(
        "deep_vit_afbo_lowrank_r56",
        pretrained=True,
        pretrained_cfg_overlay=overlay,
        in_chans=channels,
        rank=8,
        **DEEP,
    )
    assert "random init" not in caplog.text
    state, expected = model.state_dict(), plain.state_dict()
    weight = expected.pop("patch_embed.weight").unflatten(1, (3, 4, 4))
    weight = {1: weight.sum(1, keepdim=True), 3: weight, 4: weight[:, [0, 1, 2, 0]] * 3 / 4}[channels]
    assert torch.allclose(state.pop("patch_embed.weight"), weight.flatten(1), atol=1e-6)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert model(torch.randn(2, channels, 32, 32)).shape == (2, 100)


def test_deep_vit_takes_the_rates_of_zero_that_timms_scripts_pass():
    timm.create_model("deep_vit_mlp", drop_rate=0.0, drop_path_rate=0.0, attn_drop_rate=0, **DEEP)
    for name in ("drop_rate", "drop_path_rate"):
        with pytest.raises(ValueError, match=f"{name} must be 0, .*got 0.1"):
            timm.create_model("deep_vit_mlp", **{name: 0.1}, **DEEP)


@torch.no_grad()
def test_deep_vit_without_a_head():
    model = timm.create_model("deep_vit_mlp", num_classes=0, **DEEP)
    assert model(X).shape == (2, 32)
    assert isinstance(model.get_classifier(), nn.Identity)
    model.reset_classifier(4)
    assert model(X).shape == (2, 4)
    model.reset_classifier(0, "")
    assert model(X).shape == (2, 64, 32)
    with pytest.raises(ValueError, match="global_pool must be one of avg"):
        timm.create_model("deep_vit_mlp", global_pool="token", **DEEP)


@torch.no_grad()
def test_deep_vit_features():
    model = timm.create_model("deep_vit_afbo_lowrank_r56", rank=8, img_size=64, **DEEP)
    x = torch.randn(2, 3, 64, 64)
    final, maps = model.forward_intermediates(x, indices=[0, -1], norm=True)
    assert [tuple(m.shape) for m in maps] == [(2, 32, 16, 16)] * 2
    assert torch.equal(final, model.forward_features(x))
    tokens = model.forward_intermediates(x, indices=2, output_fmt="NLC", intermediates_only=True, stop_early=True)
    assert [tuple(t.shape) for t in tokens] == [(2, 256, 32)] * 2
    features = timm.create_model("deep_vit_afbo_lowrank_r56", features_only=True, out_indices=(0, 1), rank=8, **DEEP)
    assert features.feature_info.channels() == [32, 32]
    assert features.feature_info.reduction() == [4, 4]
    assert [tuple(m.shape) for m in features(X)] == [(2, 32, 8, 8)] * 2
    assert len(features.model.blocks) == 2


def test_deep_vit_under_timms_own_training_tools():
    from timm.optim import create_optimizer_v2, param_groups_layer_decay

    model = timm.create_model("deep_vit_afbo_lowrank_r56", rank=8, **DEEP).train()
    create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    assert len(param_groups_layer_decay(model)) > 4
    y = model(X)
    y.sum().backward()
    plain = model.patch_embed.weight.grad.clone()
    model.zero_grad()
    model.set_grad_checkpointing()
    model(X).sum().backward()
    assert torch.allclose(model.patch_embed.weight.grad, plain, atol=1e-6)
