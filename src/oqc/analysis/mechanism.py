"""All metrics of docs/metrics.md in one pass over a data set: overlap of branch and host, geometry of the features."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from oqc.analysis.geometry import METRICS as GEOMETRY
from oqc.analysis.geometry import geometry
from oqc.analysis.overlap import METRICS as OVERLAP
from oqc.analysis.overlap import OverlapSums
from oqc.config import Train
from oqc.data import Dataset, eval_batches
from oqc.nn.modes import evaluating
from oqc.train.numerics import DTYPES, numerics

METRICS = (*OVERLAP, *GEOMETRY)
# The candidate that is set beside the paper's "separation score", which comes without a formula.
SEPARATION = "separation_centroids"
BATCH = 256  # the intermediates of so many images are in memory at once


def mechanism(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float | None]:
    """Every metric of a model over batches of images and labels; None where it has no such part or none is defined.

    The model is one that returns its intermediates and features, as `DeepViT` does: by the literal equations, in the
    precision of its weights.
    """
    sums = OverlapSums()
    features: list[Tensor] = []
    labels: list[Tensor] = []
    with evaluating(model):
        for x, classes in batches:
            _, named = model(x, intermediates=True)
            sums.add(named)
            features.append(named["features"])
            labels.append(classes)
    if not features:
        raise ValueError("batches must hold at least one batch, got none")
    return sums.means() | geometry(torch.cat(features), torch.cat(labels))


def mechanism_on_test(
    model: nn.Module, dataset: Dataset, train: Train, device: torch.device
) -> dict[str, float | None]:
    """The metrics over all test images of a model that was trained as `train` says, without TF32."""
    batches = eval_batches(dataset.test, dataset, batch=BATCH, device=device, dtype=DTYPES[train.precision])
    with numerics(tf32=False, deterministic=train.deterministic):
        return mechanism(model, batches)
