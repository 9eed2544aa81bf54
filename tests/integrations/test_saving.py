"""save and load: what is refused, what is noticed, what is kept."""

import json

import pytest
import timm
import torch
import transformers
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

import oqc
from oqc.config import Run, to_dict
from oqc.integrations.folding import fold
from oqc.integrations.injection import inject, specification
from oqc.integrations.saving import load, save
from oqc.nn.ffn import mlp_layer

ARGUMENTS = {"embed_dim": 32, "depth": 2, "num_heads": 2}
X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def randomised(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


def vit(**options):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, **ARGUMENTS, **options)
    inject(model, "lowrank", rank=4, blocks=[1], gate_init=-1.5)
    return randomised(model)


@torch.no_grad()
def test_the_injection_is_kept(tmp_path):
    model = vit()
    save(model, tmp_path / "a" / "b", arguments=ARGUMENTS)
    twin = load(tmp_path / "a" / "b")
    assert specification(twin) == specification(model)
    assert specification(twin)["modules"] == ["blocks.1.mlp"]
    assert specification(twin)["gate_init"] == -1.5
    assert not twin.training
    assert torch.equal(twin(X), model(X))
    record = json.loads((tmp_path / "a" / "b" / "oqc.json").read_text())
    assert record["base"]["name"] == "vit_tiny_patch16_224"
    assert record["injection"]["init"] == "identity"
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["model.safetensors", "oqc.json"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.create_model(
            "vit_tiny_patch16_224", img_size=32, mlp_layer=mlp_layer("full", rank=4), **ARGUMENTS
        ),
        lambda: oqc.create_model("deep_vit_afbo_lowrank_r56", depth=2, width=32, heads=2, hidden=48, rank=4),
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, **ARGUMENTS),
    ],
)
@torch.no_grad()
def test_models_built_with_a_complement_or_without_any(tmp_path, make):
    model = randomised(make())
    save(model, tmp_path, arguments=ARGUMENTS if hasattr(model, "pretrained_cfg") else None)
    assert torch.equal(load(tmp_path)(X), model(X))


@torch.no_grad()
def test_precision_is_kept(tmp_path):
    model = vit().bfloat16()
    save(model, tmp_path, arguments=ARGUMENTS)
    twin = load(tmp_path)
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    assert torch.equal(twin(X.bfloat16()), model(X.bfloat16()))


@pytest.mark.parametrize(
    "wrap", [torch.compile, nn.DataParallel, AveragedModel, ModelEmaV3, lambda model: torch.compile(ModelEmaV3(model))]
)
@torch.no_grad()
def test_wrappers_are_taken_off(tmp_path, wrap):
    model = vit()
    save(wrap(model), tmp_path, arguments=ARGUMENTS)
    assert torch.equal(load(tmp_path)(X), model(X))


def test_a_run_is_not_taken_for_a_transformers_model(tmp_path):
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_dict(Run())))
    with pytest.raises(ValueError, match=r"is a run of oqc train; .*: oqc export '.*a run' --to safetensors --out"):
        load(folder)


@torch.no_grad()
def test_tied_weights(tmp_path):
    """A text model with a tied output layer, as the library has it."""
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertForMaskedLM(config)
    inject(model, rank=4, blocks=[0, 1])
    randomised(model)
    save(model, tmp_path)
    record = json.loads((tmp_path / "oqc.json").read_text())
    assert "cls.predictions.decoder.weight" in {*record["tied"], *record["tied"].values()}
    twin = load(tmp_path)
    assert twin.cls.predictions.decoder.weight is twin.bert.embeddings.word_embeddings.weight
    tokens = torch.arange(10)[None]
    assert torch.equal(twin(tokens).logits, model(tokens).logits)


@torch.no_grad()
def test_folded(tmp_path):
    model = vit()
    y = model(X)
    fold(model)
    assert torch.allclose(model(X), y, atol=1e-6)
    save(model, tmp_path, arguments=ARGUMENTS)
    twin = load(tmp_path)
    assert twin.blocks[1].mlp.complement.merged is not None
    assert torch.equal(twin(X), model(X))


@torch.no_grad()
def test_a_replaced_head_is_saved(tmp_path):
    model = oqc.create_model("deep_vit_mlp", depth=2, width=32, heads=2)
    model.head = nn.Linear(32, 7)
    save(model, tmp_path)
    assert torch.equal(load(tmp_path)(X), model.eval()(X))


def test_a_model_that_would_not_come_back_is_refused(tmp_path):
    model = vit()
    with pytest.raises(ValueError, match=r"is not this model; pass arguments= with what its constructor was given"):
        save(model, tmp_path)
    with pytest.raises(ValueError, match=r"blocks.0.attn.num_heads is 2, rebuilt 4"):
        save(model, tmp_path, arguments={**ARGUMENTS, "num_heads": 4})
    with pytest.raises(ValueError, match="arguments must be numbers, text"):
        save(model, tmp_path, arguments={**ARGUMENTS, "act_layer": nn.ReLU})
    with pytest.raises(ValueError, match="Sequential is not a model of oqc, timm, torchvision, transformers"):
        save(nn.Sequential(nn.Linear(4, 4)), tmp_path)
    network = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    inject(network, rank=2)
    with pytest.raises(ValueError, match="SequentialWithComplement is not a model of oqc, timm"):
        save(network, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message", "cause"),
    [
        ([1], r"a dict of what the model's constructor was given, got \[1\]$", None),
        ({"depht": 2}, r"what timm's vit_tiny_.* can be built with, got {'depht': 2}: .*argument 'depht'$", TypeError),
        ({"depth": "2"}, r"what timm's .*, got {'depth': '2'}: unsupported operand", TypeError),
        ({"embed_dim": 32}, r"what timm's .*, got {'embed_dim': 32}: dim should be divisible", AssertionError),
    ],
)
def test_mistaken_arguments_are_named(tmp_path, arguments, message, cause):
    with pytest.raises(ValueError, match=f"^arguments must be {message}") as told:
        save(vit(), tmp_path, arguments=arguments)
    assert isinstance(told.value.__cause__, cause or type(None))
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_a_librarys_own_errors_of_arguments_are_one_line(tmp_path):
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**config))
    with pytest.raises(ValueError, match=r"^arguments must be what .*, got {'hidden_size': 'a'}: .*expected int.*$"):
        save(model, tmp_path, arguments={"hidden_size": "a"})


def test_a_head_of_ones_own_is_named_first_with_the_other_way(tmp_path):
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**config, num_labels=10))
    model.classifier = nn.Linear(32, 7)
    with pytest.raises(ValueError, match=r"^classifier.out_features is 7, rebuilt 10: transformers's ViT") as told:
        save(model, tmp_path)
    assert len(str(told.value)) < 300
    model = vit()
    model.head = nn.Sequential(nn.Dropout(), nn.Linear(32, 5))
    with pytest.raises(ValueError, match=r"^'head.0' is in the model only: .*, save its state_dict\(\) with"):
        save(model, tmp_path, arguments=ARGUMENTS)


def test_a_wrapper_that_only_pushes_as_transformers_models_do_is_none(tmp_path):
    """As peft's are: its models get their `push_to_hub` from transformers."""
    wrapper = type("PeftModel", (transformers.utils.PushToHubMixin, nn.Sequential), {})(vit())
    with pytest.raises(ValueError, match="PeftModel is not a model of oqc, timm, torchvision, transformers"):
        save(wrapper, tmp_path)


def test_a_quantised_layer_is_named(tmp_path):
    model = vit()
    fc2 = model.blocks[0].mlp.fc2
    weight = nn.Parameter((127 * fc2.weight).to(torch.int8), requires_grad=False)
    del fc2.weight
    fc2.register_parameter("weight", weight)
    with pytest.raises(
        ValueError, match=r"blocks\.0\.mlp\.fc2 \(Linear\) is quantised: save the model before that, or its"
    ):
        save(model, tmp_path, arguments=ARGUMENTS)
    assert not list(tmp_path.iterdir())


def test_two_injections_are_not_taken_for_one(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", **ARGUMENTS)
    for block, rank in zip(model.blocks, (2, 4), strict=False):
        inject(block, rank=rank)
    with pytest.raises(ValueError, match=r"blocks.0.mlp and blocks.1.mlp were injected with different settings"):
        save(model, tmp_path, arguments=ARGUMENTS)


def change(path, **fields):
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | fields))


def base(path, **fields):
    change(path, base=json.loads(path.read_text())["base"] | fields)


def injection(path, **fields):
    change(path, injection=json.loads(path.read_text())["injection"] | fields)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "oqc.json").unlink(), "is not a saved model: it has no oqc.json"),
        (lambda f: (f / "oqc.json").write_text("{"), "oqc.json is damaged: it is not JSON"),
        (lambda f: (f / "oqc.json").write_text("[]"), "it is not the record of a saved model"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors cannot be read"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "its digest is not the one in oqc.json"),
        (lambda f: change(f / "oqc.json", format=2), "has format 2; this version of oqc reads format 1"),
        (lambda f: change(f / "oqc.json", injection=None), "which the model does not"),
        (
            lambda f: change(f / "oqc.json", base={"library": "timm"}),
            "its base model needs library, name and arguments",
        ),
        (lambda f: base(f / "oqc.json", library="os"), "library must be one of oqc, timm, torchvision, transformers"),
        (lambda f: base(f / "oqc.json", name="hf-hub:someone/model"), "timm has no model 'hf-hub:someone/model'"),
        (lambda f: base(f / "oqc.json", arguments={"pretrained": True}), "arguments must not have 'pretrained'"),
        (lambda f: base(f / "oqc.json", library="transformers", name="pipeline"), "has no model class 'pipeline'"),
        (lambda f: base(f / "oqc.json", arguments=5), "oqc.json tells of no model that can be built"),
        (lambda f: base(f / "oqc.json", arguments={"foo": 1}), "oqc.json tells of no model that can be built"),
        (lambda f: change(f / "oqc.json", tied=[1]), "oqc.json is damaged: tied must name tensors of"),
        (lambda f: change(f / "oqc.json", tied={"head.weight": "x"}), "oqc.json is damaged: tied must name tensors of"),
        (lambda f: change(f / "oqc.json", tied={"a": ["b"]}), "oqc.json is damaged: tied must name tensors of"),
        (lambda f: injection(f / "oqc.json", modules=3), "oqc.json tells of no model that can be built"),
        (lambda f: injection(f / "oqc.json", rank=2), "does not fit the model in oqc.json"),
    ],
)
def test_damage_and_trickery_are_named(tmp_path, damage, message):
    save(vit(), tmp_path, arguments=ARGUMENTS)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_no_folder_is_not_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path must name a folder, got ''"):
        save(vit(), "", arguments=ARGUMENTS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("indices", [None, (1, 3)])
@torch.no_grad()
def test_a_timm_model_of_features(tmp_path, indices):
    options = {"depths": (1, 1, 1, 1), "embed_dim": 24, "img_size": 64, "window_size": 2}
    given = options if indices is None else options | {"out_indices": indices}
    model = timm.create_model("swin_tiny_patch4_window7_224", features_only=True, **given).eval()
    inject(model, "lowrank", rank=8, init="paper")
    save(model, tmp_path, arguments=options)
    x = torch.randn(1, 3, 64, 64)
    assert all(torch.equal(a, b) for a, b in zip(load(tmp_path)(x), model(x), strict=True))


@torch.no_grad()
def test_a_timm_model_of_features_by_name(tmp_path):
    options = {"depths": (1, 1, 1, 1), "dims": (8, 8, 8, 8)}
    model = timm.create_model("convnext_tiny", features_only=True, feature_cls="dict", **options).eval()
    inject(model, "lowrank", rank=4, init="paper")
    save(model, tmp_path, arguments=options)
    x = torch.randn(1, 3, 64, 64)
    want, got = model(x), load(tmp_path)(x)
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("name", "options"),
    [("vit_tiny_patch16_224", ARGUMENTS), ("swin_tiny_patch4_window7_224", {"depths": (1, 1, 1, 1), "embed_dim": 24})],
)
def test_timms_stochastic_depth_is_told_by_the_model(tmp_path, name, options):
    model = timm.create_model(name, drop_path_rate=0.25, **options)
    inject(model, "lowrank", rank=8)
    save(model, tmp_path, arguments=options)
    found = [part.drop_prob for part in load(tmp_path).modules() if type(part).__name__ == "DropPath"]
    assert found == [part.drop_prob for part in model.modules() if type(part).__name__ == "DropPath"]
    assert max(found) == pytest.approx(0.25)


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    """A crash while writing leaves the old model whole."""
    model = vit()
    save(model, tmp_path, arguments=ARGUMENTS)
    with torch.no_grad():
        y = load(tmp_path)(X)
        model.head.bias.add_(1)

    def crash(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="no space left"):
        save(model, tmp_path, arguments=ARGUMENTS)
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(X), y)


def test_what_is_not_a_path_or_a_device_is_named(tmp_path, monkeypatch):
    save(vit(), tmp_path, arguments=ARGUMENTS)
    with pytest.raises(ValueError, match=r"^path must be a str or a Path, got None$"):
        save(vit(), None)
    with pytest.raises(ValueError, match=r"^path must be a str or a Path, got None$"):
        load(None)
    monkeypatch.setattr("oqc.integrations.saving._build", None)
    for device in ("foo", "cuda:99"):
        with pytest.raises(ValueError, match=rf"^device must be one that PyTorch has here, got {device!r}.*$"):
            load(tmp_path, device=device)


def test_a_file_of_somebody_else_stays(tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ValueError, match=r"has a model.safetensors that oqc.save did not write; name another folder"):
        save(vit(), tmp_path, arguments=ARGUMENTS)
    with pytest.raises(ValueError, match=r"path must be a folder that can be written, but .* is a file"):
        save(vit(), tmp_path / "model.safetensors" / "inner", arguments=ARGUMENTS)
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1


@torch.no_grad()
def test_a_new_host_in_a_folded_model_is_followed(tmp_path):
    """M = W O is of the old W: a checkpoint without the branch undoes the folding."""
    model, other = vit(), vit()
    for parameter in other.parameters():
        parameter.add_(0.1)
    host = {name: value for name, value in other.state_dict().items() if ".complement." not in name}
    fold(model)
    model.load_state_dict(host)
    plain = vit()
    plain.load_state_dict(host)
    assert torch.equal(model(X), plain(X))


@torch.no_grad()
def test_hooks_run_in_a_folded_model():
    model = fold(vit())
    seen = []
    model.blocks[0].mlp.fc2.register_forward_hook(lambda module, given, out: seen.append("fc2"))
    model.blocks[1].mlp.complement.lift.register_forward_hook(lambda module, given, out: seen.append("lift"))
    model(X)
    assert seen == ["fc2", "lift"]


@torch.no_grad()
def test_a_buffer_that_grew_in_a_forward(tmp_path):
    torch.manual_seed(0)
    options = {"embed_dim": 24, "depth": 2, "num_heads": 2, "img_size": 32, "num_classes": 5}
    model = timm.create_model("convit_tiny", **options).eval()
    y = model(X)
    inject(model, rank=4)
    save(model, tmp_path, arguments=options)
    torch.testing.assert_close(load(tmp_path)(X), y)


@torch.no_grad()
def test_a_folded_model_that_is_given_other_weights_computes_with_them():
    model, other = fold(vit()), vit()
    for parameter in other.parameters():
        parameter.mul_(1.5)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(X), other(X))
    fold(other)
    assert model.state_dict().keys() == other.state_dict().keys()
