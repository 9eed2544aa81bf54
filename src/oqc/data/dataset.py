"""A data set in memory: train, an optional held-out part of train, and test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oqc.config import Data
from oqc.data import pack, sources
from oqc.data.raw import stratified


@dataclass(frozen=True)
class Split:
    """Images uint8 [n, C, H, W] and labels int64 [n]."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> Split:
        return Split(self.images.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """`mean` and `std` are those of the whole training part, per channel, in 0..1; `digest` names the content."""

    name: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Split
    val: Split | None
    test: Split
    digest: str


def load(config: Data) -> Dataset:
    """The data set of a config: verified and packed into the cache the first time, memory-mapped from there after."""
    manifest, arrays = pack.load(sources.prepare(config.name, config.root, config.image_size))
    val, train = None, Split(arrays["train_images"], arrays["train_labels"])
    if config.val:
        kept, held = stratified(train.labels.numpy(), config.val, config.val_seed, "val")
        if not len(held):
            raise ValueError(f"val must hold out at least one image, got {config.val} of {len(train)} images")
        train, val = _take(train, kept), _take(train, held)
    return Dataset(
        name=manifest["name"],
        classes=tuple(manifest["classes"]),
        mean=tuple(manifest["mean"]),
        std=tuple(manifest["std"]),
        train=train,
        val=val,
        test=Split(arrays["test_images"], arrays["test_labels"]),
        digest=manifest["digest"],
    )


def _take(split: Split, index: np.ndarray) -> Split:
    chosen = torch.from_numpy(index)
    return Split(split.images[chosen], split.labels[chosen])
