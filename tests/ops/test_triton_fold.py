"""The products of weights, and their gradients, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fused_oracle import DEVICE
from guards import Guards

from oqc.config import FFN, Model
from oqc.models import DeepViT
from oqc.nn import OQCFFN, fold_together
from oqc.ops import plain, triton_fold


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("space", ["rank", "hidden", "none"])
@pytest.mark.parametrize(("width", "hidden", "rank"), [(5, 16, 3), (33, 70, 17), (16, 33, 8), (70, 140, 67)])
def test_fold(width: int, hidden: int, rank: int, space: str, layers: int, guards: Guards) -> None:
    shapes = ((width, hidden), (hidden, rank), (rank, hidden))
    weight, lift, project = (torch.randn(layers, *shape, device=DEVICE) for shape in shapes)
    given = project if space == "rank" else None
    results = triton_fold.forward(weight, lift, given, space=space, dtype=torch.float32)
    doubles = [None if item is None else item.double() for item in (weight, lift, given)]
    upstream = torch.randn_like(results[0])
    gradients = triton_fold.backward(upstream, weight, lift, given, space=space, dtype=torch.float32)
    guards.check()
    expected = plain.fold(*doubles, space, torch.float64)
    exact = plain.gradients(lambda *args: plain.fold(*args)[0], upstream.double(), doubles, (space, torch.float64))
    for one, other in zip((*results, *gradients), (*expected, *exact), strict=True):
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= 1e-5 * other.norm() + 1e-12


def test_layers_folded_together_train_as_folded_alone() -> None:
    """A Deep-ViT folds all its layers in one launch: the same outputs and gradients as layer by layer."""
    config = Model(image_size=8, patch_size=4, width=16, depth=3, heads=2, num_classes=5, ffn=FFN(hidden=24, rank=5))
    x = torch.randn(2, 3, 8, 8, device=DEVICE)
    for complement in ("lowrank", "full", "dynamic", "unprojected", "shared"):
        model = DeepViT(replace(config, ffn=replace(config.ffn, complement=complement)), seed=0, backend="triton")
        model = model.to(DEVICE)
        assert all(item is not None for item in fold_together([block.ffn for block in model.blocks], x))
        found = []
        for together in (True, False):
            model.zero_grad()
            features = model.embed(x)
            folded = fold_together([block.ffn for block in model.blocks], x) if together else [None] * 3
            for block, weights in zip(model.blocks, folded, strict=True):
                features = block(features, weights)
            features.square().sum().backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            found.append({"y": features.detach()} | gradients)
        assert found[0].keys() == found[1].keys()
        assert any("lift" in name for name in found[0])
        for name, one in found[0].items():
            torch.testing.assert_close(
                one, found[1][name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_layers_that_differ_fold_by_themselves() -> None:
    x = torch.randn(2, 4, 16, device=DEVICE)
    layers = [OQCFFN(16, 24, host="afbo", complement="lowrank", rank=rank, backend="triton") for rank in (5, 6)]
    assert fold_together([layer.to(DEVICE) for layer in layers], x) == [None, None]
    assert fold_together([layers[0], torch.nn.Identity()], x) == [None, None]
    assert fold_together([None, None], x) == [None, None]
