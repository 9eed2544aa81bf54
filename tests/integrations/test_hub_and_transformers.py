"""Sharing: transformers' own save_pretrained, and Deep-ViT through huggingface_hub's mixin."""

import copy
import json
import logging
import shutil
import warnings

import huggingface_hub
import pytest
import torch
import transformers
from torch import nn

import oqc
from oqc.integrations import transformers as ours
from oqc.integrations.hub import HubDeepViT
from oqc.integrations.injected import Injected
from oqc.integrations.injection import inject, remove, specification
from oqc.integrations.saving import load, save

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {**SIZES, "image_size": 32, "patch_size": 8}


def randomised(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


def vit():
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=5))
    inject(model, "lowrank", rank=4, blocks=[1])
    return randomised(model)


@torch.no_grad()
def test_save_pretrained_keeps_the_branch(tmp_path):
    model = vit()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["oqc"] == specification(model)
    for twin in (ours.from_pretrained(tmp_path), load(tmp_path)):
        assert type(twin) is transformers.ViTForImageClassification
        assert specification(twin) == specification(model)
        assert torch.equal(twin(X).logits, model(X).logits)
    half = ours.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    twin.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(X).logits, model(X).logits)


def test_plain_from_pretrained_says_that_the_branch_was_not_used(tmp_path, caplog):
    vit().save_pretrained(tmp_path)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    finally:
        logger.removeHandler(caplog.handler)
    assert not any(isinstance(part, Injected) for part in model.modules())
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert any("complement" in text for text in warned), warned


def test_remove_takes_the_entry_out_of_the_config(tmp_path):
    model = vit()
    remove(model)
    model.save_pretrained(tmp_path)
    assert "oqc" not in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match="has no injected model: its config has no oqc entry"):
        ours.from_pretrained(tmp_path)


@torch.no_grad()
def test_a_tower_of_a_larger_model(tmp_path):
    """Only CLIP's vision tower is injected; the whole model is saved."""
    config = transformers.CLIPConfig(
        text_config={**SIZES, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}, vision_config=VISION
    )
    model = transformers.CLIPModel(config)
    inject(model.vision_model, "lowrank", rank=4)
    randomised(model)
    y = model.vision_model(X).last_hidden_state
    model.save_pretrained(tmp_path / "theirs")
    save(model, tmp_path / "ours")
    for name in ("theirs", "ours"):
        twin = load(tmp_path / name)
        assert not any(isinstance(part, Injected) for part in twin.text_model.modules())
        assert torch.equal(twin.vision_model(X).last_hidden_state, y)


@torch.no_grad()
def test_an_inner_model_that_shares_the_outer_ones_config(tmp_path):
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=5))
    inject(model.vit, "full", rank=4)
    randomised(model).save_pretrained(tmp_path)
    again = load(tmp_path)
    assert isinstance(again, transformers.ViTForImageClassification)
    assert torch.equal(model(X).logits, again(X).logits)


def test_a_part_that_no_config_can_tell_of_is_warned_about():
    model = transformers.ViTModel(transformers.ViTConfig(**VISION))
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    with pytest.warns(UserWarning, match="its save_pretrained would not tell of the branch"):
        inject(layers, rank=4)
    with warnings.catch_warnings(action="error"):
        inject(transformers.ViTModel(transformers.ViTConfig(**VISION)), rank=4)
        inject(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), rank=2)


def test_a_folder_whose_branch_was_lost_is_refused(tmp_path):
    model = vit()
    model.save_pretrained(tmp_path)
    state = {name: value for name, value in model.state_dict().items() if ".complement." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"has no weights for .*complement.* which its config says were injected"):
        ours.from_pretrained(tmp_path)


def test_remove_on_the_whole_model_reaches_a_towers_config():
    config = transformers.CLIPConfig(
        text_config={**SIZES, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}, vision_config=VISION
    )
    model = transformers.CLIPModel(config)
    inject(model.vision_model, rank=4)
    assert "oqc" in model.config.to_dict()["vision_config"]
    remove(model)
    assert "oqc" not in model.config.to_dict()["vision_config"]


def deep_vit(**options):
    return oqc.create_model("deep_vit_afbo", depth=2, width=32, heads=2, hidden=48, num_classes=5, **options)


@torch.no_grad()
def test_deep_vit_through_the_mixin(tmp_path):
    model = deep_vit(complement="lowrank", rank=4)
    randomised(model)
    hub = HubDeepViT.of(model)
    hub.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors", "oqc.json"}
    twin = HubDeepViT.from_pretrained(tmp_path)
    assert twin.config == model.config
    assert torch.equal(twin(X), hub(X))
    assert torch.equal(load(tmp_path)(X), hub(X))
    with pytest.raises(ValueError, match="takes a DeepViT here, got a Linear"):
        HubDeepViT.of(nn.Linear(2, 2))


def test_the_hubs_config_follows_the_head(tmp_path):
    hub = HubDeepViT.of(deep_vit())
    for classes in (7, 0):
        hub.head = nn.Linear(32, classes) if classes else nn.Identity()
        hub.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["num_classes"] == classes
        assert HubDeepViT.from_pretrained(tmp_path).config.num_classes == classes


def test_what_is_no_shared_deep_vit_is_named(tmp_path):
    hub = HubDeepViT.of(deep_vit())
    assert HubDeepViT.of(hub) is hub
    hub.save_pretrained(tmp_path / "hub")
    (tmp_path / "hub" / "oqc.json").unlink()
    with pytest.raises(ValueError, match=r"is not a shared Deep-ViT: it has no oqc\.json$"):
        HubDeepViT.from_pretrained(tmp_path / "hub")
    with pytest.raises(ValueError, match=r"is not a saved model: it has no oqc\.json$"):
        load(tmp_path / "hub")
    save(transformers.ViTModel(transformers.ViTConfig(**VISION)), tmp_path / "vit")
    with pytest.raises(ValueError, match=r"holds a ViTModel, not a DeepViT: use oqc\.load"):
        HubDeepViT.from_pretrained(tmp_path / "vit")


@pytest.mark.parametrize(
    ("option", "hint"), [("map_locaton", r"; did you mean 'map_location'\?"), ("config", ""), ("dtype", "")]
)
def test_an_option_that_from_pretrained_does_not_have_is_named(tmp_path, option, hint):
    HubDeepViT.of(deep_vit()).save_pretrained(tmp_path)
    message = rf"^an option of from_pretrained must be one of .*revision, map_location, got '{option}'{hint}$"
    with pytest.raises(ValueError, match=message):
        HubDeepViT.from_pretrained(tmp_path, **{option: None})
    hub = {"revision": "main", "token": False, "cache_dir": tmp_path, "local_files_only": True, "force_download": False}
    model = HubDeepViT.from_pretrained(tmp_path, **hub, map_location="meta")
    assert model.pos_embed.is_meta


@pytest.mark.parametrize("entry", ["yes", {"modules": 5}, {"modules": [[1]]}])
def test_an_entry_that_is_none_is_named(tmp_path, entry):
    vit().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"oqc": entry}))
    with pytest.raises(ValueError, match="has no injected model: its config has no oqc entry"):
        load(tmp_path)


@torch.no_grad()
def test_push_and_pull(tmp_path, monkeypatch):
    """The hub is a folder here: what is uploaded is what is downloaded."""
    remote = tmp_path / "remote"

    def upload_folder(self, *, repo_id, folder_path, **options):
        assert repo_id == "someone/deep-vit"
        shutil.copytree(folder_path, remote)

    def download(repo_id, filename, **options):
        assert options["revision"] == "v1"
        return str(remote / filename)

    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "create_repo",
        lambda self, repo_id, **o: huggingface_hub.RepoUrl(f"https://hf.co/{repo_id}"),
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr("oqc.integrations.hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    model = deep_vit()
    inject(model, "full", rank=4)
    randomised(model)
    HubDeepViT.of(model).push_to_hub("someone/deep-vit")
    twin = HubDeepViT.from_pretrained("someone/deep-vit", revision="v1")
    assert specification(twin) == specification(model)
    assert torch.equal(twin(X), model(X))


def test_a_plain_model_with_an_injected_ones_config_is_told_what_to_do(tmp_path):
    config = transformers.ViTConfig(**VISION, num_labels=5)
    inject(transformers.ViTForImageClassification(config), "lowrank", rank=4)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no weights for .*take the oqc entry out of config.json"):
        ours.from_pretrained(tmp_path)


@torch.no_grad()
def test_a_part_that_has_a_copy_of_the_config(tmp_path):
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    config = transformers.ViTMAEConfig(**VISION, **decoder, decoder_intermediate_size=32)
    model = transformers.ViTMAEForPreTraining(config)
    inject(model, "lowrank", rank=4)
    randomised(model).save_pretrained(tmp_path)
    noise = torch.rand(2, 16, generator=torch.Generator().manual_seed(0))
    for twin in (ours.from_pretrained(tmp_path), load(tmp_path)):
        assert specification(twin) == specification(model)
        assert torch.equal(twin(X, noise=noise).logits, model(X, noise=noise).logits)


@torch.no_grad()
def test_two_models_of_one_config_keep_their_own_records(tmp_path):
    config = transformers.ViTConfig(**VISION, num_labels=5)
    models = [transformers.ViTForImageClassification(config) for _ in range(3)]
    for model, rank in zip(models, (4, 8, 4), strict=True):
        randomised(model)
        inject(model, "lowrank", rank=rank, init="paper")
        assert model.vit.config is model.config
    remove(models[2])
    for i, model in enumerate(models[:2]):
        model.save_pretrained(tmp_path / str(i))
        twin = load(tmp_path / str(i))
        assert specification(twin) == specification(model)
        assert torch.equal(twin(X).logits, model(X).logits)


@torch.no_grad()
def test_a_whole_model_does_not_take_over_the_record_of_anothers_tower(tmp_path):
    config = transformers.CLIPConfig(
        text_config={**SIZES, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}, vision_config=VISION
    )
    first, second = transformers.CLIPModel(config), transformers.CLIPModel(config)
    inject(first.vision_model, rank=4)
    inject(second, rank=8)
    for name, model in (("first", first), ("second", second)):
        model.save_pretrained(tmp_path / name)
        assert specification(load(tmp_path / name)) == specification(model)


@pytest.mark.parametrize("loaded", [False, True])
@torch.no_grad()
def test_after_a_part_is_removed_the_record_has_what_still_stands(tmp_path, loaded):
    model = transformers.ViTModel(transformers.ViTConfig(**VISION, num_labels=5))
    inject(model, "lowrank", rank=4)
    randomised(model)
    if loaded:
        model.save_pretrained(tmp_path / "whole")
        model = load(tmp_path / "whole")
    first, second = specification(model)["modules"]
    remove(model.get_submodule(first.rpartition(".")[0]))
    model.save_pretrained(tmp_path / "part")
    twin = load(tmp_path / "part")
    assert specification(twin)["modules"] == model.config.oqc["modules"] == [second]
    assert torch.equal(twin(X).last_hidden_state, model(X).last_hidden_state)
    remove(model.get_submodule(second))
    model.save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match="its config has no oqc entry"):
        load(tmp_path / "none")
    inject(model, rank=4)
    remove(model)
    assert not hasattr(model.config, "oqc")


def test_a_config_that_was_copied_meanwhile_tells_nothing_after_the_removal(tmp_path):
    model = transformers.ViTModel(transformers.ViTConfig(**VISION, num_labels=5))
    inject(model, "lowrank", rank=4)
    model.config = copy.deepcopy(model.config)
    remove(model)
    assert not hasattr(model.config, "oqc")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its config has no oqc entry"):
        load(tmp_path)


def test_where_the_files_are_is_told_for_the_config_too(tmp_path, monkeypatch):
    vit().save_pretrained(tmp_path / "inner")
    asked = []
    read = transformers.AutoConfig.from_pretrained

    def from_pretrained(path, **options):
        asked.append(options)
        return read(path, **options)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", from_pretrained)
    ours.from_pretrained(tmp_path, subfolder="inner", local_files_only=True, dtype=torch.float32)
    assert asked == [{"subfolder": "inner", "local_files_only": True, "return_unused_kwargs": True}]


def test_options_are_transformers_own(tmp_path):
    model = vit()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(X).logits
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for options in (
        {"config": config},
        {"config": tmp_path},
        {"attn_implementation": "eager"},
        {"output_hidden_states": True},
    ):
        assert torch.allclose(ours.from_pretrained(tmp_path, **options)(X).logits, want, atol=1e-6)
    again, found = ours.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(again(X).logits, want)
    assert not found["missing_keys"]
    with torch.no_grad():
        other = ours.from_pretrained(tmp_path, num_labels=3, ignore_mismatched_sizes=True, dtype=torch.bfloat16)
    assert other(X.bfloat16()).logits.shape == (len(X), 3)
    assert other.dtype == torch.bfloat16
    assert ours.from_pretrained(tmp_path, hidden_dropout_prob=0.25).config.hidden_dropout_prob == 0.25


@torch.no_grad()
def test_a_part_of_the_model_that_was_injected_is_saved_and_loaded_by_itself(tmp_path):
    """The config that both share names the modules from the whole."""
    model = vit()
    model.vit.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert type(again) is transformers.ViTModel
    assert torch.equal(model.vit(X).last_hidden_state, again(X).last_hidden_state)
    again.save_pretrained(tmp_path / "again")  # by its own paths now
    assert torch.equal(model.vit(X).last_hidden_state, load(tmp_path / "again")(X).last_hidden_state)
    assert again.config.oqc["modules"] == [path.removeprefix("vit.") for path in model.config.oqc["modules"]]
