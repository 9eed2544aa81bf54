"""The examples run, on images made here, and do what they say."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from oqc.integrations import load
from oqc.integrations.injection import complements, specification

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two classes that a mean tells apart."""
    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name, level in (("dark", 60), ("light", 190)):
        (root / name).mkdir()
        for i in range(20):
            pixels = random.integers(level - 40, level + 40, (32, 32, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return str(root)


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_is_under_80_lines():
    assert len(list(EXAMPLES.glob("*.py"))) >= 3
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 80, path.name


def test_finetune_timm(images, tmp_path, capsys):
    example("finetune_timm").main([images, "--size", "32", "--epochs", "3", "--batch", "8", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "in 12 of 12 feed-forward networks" in said
    assert float(re.findall(r"test accuracy ([\d.]+)%", said)[-1]) >= 75
    model = load(tmp_path)
    assert specification(model)["rank"] == 32
    assert all(module.complement.alpha.item() != 0 for _, module in complements(model))


@pytest.mark.parametrize("model", ["deit_tiny_distilled_patch16_224", "convnext_tiny"])
def test_models_of_two_heads_or_of_one_size(model, images, tmp_path, capsys):
    size = ["--size", "32"] if model.startswith("deit") else []
    arguments = [images, "--model", model, *size, "--epochs", "0", "--batch", "16", "--out", str(tmp_path)]
    example("finetune_timm").main(arguments)
    assert "head and branch: loss" in capsys.readouterr().out


def test_transformers_trainer(images, tmp_path):
    model = example("transformers_trainer").main(
        [images, "--size", "32", "--epochs", "2", "--batch", "8", "--out", str(tmp_path)]
    )
    assert len(specification(model)["modules"]) == 4
    assert all(module.complement.alpha.item() != 0 for _, module in complements(model))
    assert torch.isfinite(model(torch.randn(1, 3, 32, 32)).logits).all()


def test_lightning_module(images, tmp_path):
    module = example("lightning_module").main(
        [images, "--size", "32", "--epochs", "2", "--batch", "8", "--out", str(tmp_path)]
    )
    assert not module.model.patch_embed.proj.weight.requires_grad
    twin = load(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(twin(x), module.model.eval()(x))
