"""What a reader hands over: uint8 images and labels of both parts, checked before anything is packed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from oqc import seeding


@dataclass(frozen=True)
class Raw:
    """Images uint8 [n, C, H, W] and labels int64 [n] of the training and the test part."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]


def check(raw: Raw, origin: str) -> None:
    """ValueError that names `origin` unless counts, shapes and labels fit and every class has training images."""
    shape = raw.train_images.shape[1:]
    for part in ("train", "test"):
        images, labels = getattr(raw, f"{part}_images"), getattr(raw, f"{part}_labels")
        if images.dtype != np.uint8 or images.ndim != 4:
            raise ValueError(f"{origin}: {part} images must be uint8 with 4 axes, got {images.dtype} {images.shape}")
        if not len(images):
            raise ValueError(f"{origin}: the {part} part has no images")
        if 0 in shape:
            raise ValueError(f"{origin}: {part} images are {shape}, without a pixel")
        if images.shape[1:] != shape:
            raise ValueError(f"{origin}: {part} images are {images.shape[1:]}, the train images {shape}")
        if labels.shape != (len(images),):
            raise ValueError(f"{origin}: {len(images)} {part} images but labels of shape {labels.shape}")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(raw.classes):
            wrong = low if low < 0 else high
            raise ValueError(
                f"{origin}: {part} label {wrong} is out of range, the labels are 0 to {len(raw.classes) - 1}"
            )
    if len(raw.classes) < 2:
        raise ValueError(f"{origin}: all images are of one class, {raw.classes[0]!r}: there is nothing to tell apart")
    counts = np.bincount(raw.train_labels, minlength=len(raw.classes))
    if not counts.all():
        raise ValueError(f"{origin}: class {raw.classes[int(counts.argmin())]!r} has no training images")


def stratified(labels: np.ndarray, share: float, seed: int, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Indices (kept, held out), both ascending: `share` of every class is held out, chosen by (seed, role) alone."""
    index = torch.arange(len(labels), dtype=torch.int64)
    order = np.lexsort((seeding.mix(index + seeding.key(seed, role)).numpy(), labels))  # by class, then by hash
    counts = np.bincount(labels)
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)  # place within the class
    quota = np.minimum(np.round(share * counts), counts - 1)  # no class is held out whole
    held = place < quota[labels[order]]
    return np.sort(order[~held]), np.sort(order[held])


def divide(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> Raw:
    """A set that comes without a test part: a fixed fifth of every class becomes one."""
    train, test = stratified(labels, share=0.2, seed=0, role="test")
    return Raw(images[train], labels[train], images[test], labels[test], classes)


def moments(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of every channel, in 0..1, exact: from counts of the 256 values."""
    counts = np.zeros((images.shape[1], 256), dtype=np.int64)
    for start in range(0, len(images), 1024):
        for channel, row in enumerate(counts):
            row += np.bincount(images[start : start + 1024, channel].ravel(), minlength=256)
    value = np.arange(256) / 255
    share = counts / counts.sum(1, keepdims=True)
    mean = share @ value
    std = np.sqrt((share * (value - mean[:, None]) ** 2).sum(1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())
