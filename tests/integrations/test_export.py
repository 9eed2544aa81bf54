"""Export: ONNX in onnxruntime and torch.export programs give what PyTorch gives, for any batch."""

import json

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import nn

import oqc
from oqc.cli.export import export
from oqc.config import FFN, Data, Model, Run, Train, to_dict
from oqc.integrations.export import to_onnx, to_torch_export
from oqc.integrations.folding import fold
from oqc.integrations.injection import inject
from oqc.integrations.saving import load
from oqc.ops import fused
from oqc.train import RunFolder, checkpoint


def randomised(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def images(batch, size=32, channels=3):
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(batch))


def onnx_error(path, model, sizes):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    errors = []
    for x in sizes:
        (y,) = session.run(None, {"images": x.numpy()})
        with torch.no_grad():
            errors.append(np.abs(y - model(x).numpy()).max())
    return max(errors)


def deep_vit(complement):
    return randomised(
        oqc.create_model(
            "deep_vit_afbo_lowrank_r56", complement=complement, depth=2, width=32, heads=2, hidden=48, rank=8
        )
    )


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("complement", ["lowrank", "full", "dynamic"])
def test_onnx(tmp_path, complement, folded):
    model = deep_vit(complement)
    if folded:
        with torch.no_grad():
            before = model(images(2))
            assert torch.allclose(fold(model)(images(2)), before, atol=1e-5)
    to_onnx(model, tmp_path / "model.onnx", images(1))
    assert onnx_error(tmp_path / "model.onnx", model, [images(1), images(3), images(8)]) < 1e-4


@torch.no_grad()
def test_torch_export(tmp_path):
    model = deep_vit("lowrank")
    to_torch_export(fold(model), tmp_path / "model.pt2", images(1))
    program = torch.export.load(tmp_path / "model.pt2").module()
    for batch in (1, 3, 8):
        assert torch.allclose(program(images(batch)), model(images(batch)), atol=1e-5)


def test_injected_timm_model_with_dynamic_image_size(tmp_path):
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=5,
        dynamic_img_size=True,
    )
    inject(model, "lowrank", rank=4, init="paper")
    randomised(model)
    to_onnx(model, tmp_path / "model.onnx", images(1, size=48), size_step=8)
    assert onnx_error(tmp_path / "model.onnx", model, [images(1), images(2, size=40), images(3, size=64)]) < 1e-4


class OwnSize(nn.Module):
    """Positions that are resampled for every size but the model's own, as timm's were before 1.0.31."""

    def __init__(self):
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, 8, 8, 8), nn.Parameter(torch.randn(1, 8, 4, 4))

    def forward(self, x):
        x, positions = self.patches(x), self.positions
        if x.shape[-2:] != positions.shape[-2:]:
            positions = nn.functional.interpolate(positions, size=x.shape[-2:], mode="bilinear")
        return (x + positions).mean((2, 3))


@pytest.mark.parametrize("write", [to_onnx, to_torch_export])
def test_a_program_for_the_models_own_size_alone_is_not_written(tmp_path, write):
    write(OwnSize(), tmp_path / "any.pt2", images(1, size=48), size_step=8)
    with pytest.raises(ValueError, match="example of 32 x 32, the program does not run at 40 x 48"):
        write(OwnSize(), tmp_path / "own.pt2", images(1), size_step=8)
    assert [path.name for path in tmp_path.iterdir()] == ["any.pt2"]


@pytest.mark.parametrize("write", [to_onnx, to_torch_export])
def test_arguments_in_another_order_and_folders_to_make(tmp_path, write):
    model = oqc.create_model("deep_vit_mlp", depth=2, width=32, heads=2)
    with pytest.raises(ValueError, match="example must be a tensor of images, got PosixPath"):
        write(model, images(1), tmp_path / "model.pt2")
    write(model, tmp_path / "new" / "model.pt2", images(1))
    assert (tmp_path / "new" / "model.pt2").stat().st_size > 0


@torch.no_grad()
@pytest.mark.parametrize(("backend", "times"), [("triton", 2), ("torch", 0)])
def test_a_folded_model_runs_on_the_kernels_where_there_are_any(backend, times, monkeypatch):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3, num_classes=5)
    inject(model, "lowrank", rank=8, init="paper", backend=backend)
    plain = randomised(model)(images(2))
    calls, by_kernels = [], fused.ffn_complement
    monkeypatch.setattr(fused, "ffn_complement", lambda *args, **rest: calls.append(1) or by_kernels(*args, **rest))
    assert torch.allclose(fold(model)(images(2)), plain, atol=1e-4 * plain.abs().max().item())
    assert len(calls) == times


@pytest.mark.parametrize("write", [to_onnx, to_torch_export])
def test_what_cannot_be_written_is_named_before_the_export(tmp_path, write, monkeypatch):
    monkeypatch.setattr(torch.export, "export", None)
    monkeypatch.setattr(torch.onnx, "export", None)
    (tmp_path / "file").touch()
    model = nn.Flatten()
    for given, path, message in (
        ("a", tmp_path / "new", r"model must be a torch\.nn\.Module, got str"),
        (model, None, "path must be a str or a Path, got None"),
        (model, tmp_path, "path must name a file, got .*, which is a folder"),
        (model, tmp_path / "file" / "new", "path's folder must be a folder that can be written, but .*file is a file"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            write(given, path, images(1))


def test_folding_needs_a_complement():
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got str"):
        fold("a")
    with pytest.raises(ValueError, match="DeepViT has no complement that can be folded"):
        fold(oqc.create_model("deep_vit_mlp", depth=2, width=32, heads=2))


@pytest.fixture
def run(tmp_path):
    """A run's folder as the trainer writes it, and its model."""
    ffn = FFN(complement="lowrank", rank=4, hidden=24)
    config = Run(
        model=Model(image_size=8, patch_size=2, channels=1, num_classes=10, width=16, depth=2, heads=2, ffn=ffn),
        data=Data(name="digits"),
        train=Train(epochs=1),
    )
    model = randomised(oqc.create_model(config.model))
    folder = RunFolder(tmp_path / "run")
    environment = {"data": {"mean": [0.3], "std": [0.4], "classes": [str(i) for i in range(10)]}}
    folder.create(config, environment)
    folder.checkpoints.mkdir()
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    checkpoint.write(folder.checkpoints, "step-000000001", weights, {"config": to_dict(config)})
    return folder.path, model


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("to", ["onnx", "torch-export", "safetensors"])
def test_command(run, to, folded, capsys):
    folder, model = run
    export(folder, to=to, fold=folded)
    out = folder / "export"
    assert capsys.readouterr().out.startswith(str(out))
    wanted = json.loads((out / "input.json").read_text())
    assert wanted["mean"] == [0.3]
    assert wanted["shape"] == [1, 8, 8]
    assert len(wanted["classes"]) == 10
    x = images(3, 8, 1)
    with torch.no_grad():
        if to == "onnx":
            assert onnx_error(out / "model.onnx", model, [x, images(1, 8, 1)]) < 1e-4
        elif to == "torch-export":
            assert torch.allclose(torch.export.load(out / "model.pt2").module()(x), model(x), atol=1e-5)
        else:
            assert torch.allclose(load(out)(x), model(x), atol=1e-5)


def test_command_refuses(run, tmp_path):
    with pytest.raises(ValueError, match="--to must be one of onnx, torch-export, safetensors, got 'onix'; did you"):
        export(run[0], to="onix")
    with pytest.raises(ValueError, match="is not the folder of a run"):
        export(tmp_path / "nothing", to="onnx")
    with pytest.raises(ValueError, match="has no checkpoint of kind best"):
        export(run[0], to="onnx", checkpoint="best")


def test_exports_of_a_run_go_with_it(run):
    folder = RunFolder(run[0])
    for to in ("onnx", "torch-export", "safetensors"):
        export(folder.path, to=to)
    (folder.exported / "model.onnx.data").write_text("mine")
    (folder.path / "mine").mkdir()
    export(folder.path, to="safetensors", out=folder.path / "mine")
    folder.create(folder.config(), folder.read("environment.json"), overwrite=True)
    assert [path.name for path in folder.exported.iterdir()] == ["model.onnx.data"]
    assert (folder.path / "mine" / "model.safetensors").exists()  # nobody takes that for the run's
    (folder.exported / "model.onnx.data").unlink()
    for name in ("model.onnx", "input.json"):
        (folder.exported / name).write_text('{"written by": "me"}')
    folder.create(folder.config(), {}, overwrite=True)
    assert len(list(folder.exported.iterdir())) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "input.json"])
def test_command_leaves_files_of_others(run, tmp_path, name):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / name).write_text("{}")
    with pytest.raises(ValueError, match=f"has a {name} that oqc export did not write; name another folder"):
        export(run[0], to="safetensors", out=mine)
    assert (mine / name).read_text() == "{}"
    with pytest.raises(ValueError, match=r"--out must be a folder that can be written, but .* is a file"):
        export(run[0], to="onnx", out=mine / name)
    export(run[0], to="safetensors", out=tmp_path / "ours")
    export(run[0], to="safetensors", out=tmp_path / "ours", fold=True)  # an earlier export may be replaced
