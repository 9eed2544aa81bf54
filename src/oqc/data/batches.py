"""Batches from a data set that lives on the device: shuffled and augmented for training, in order for evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from oqc import seeding
from oqc.config import Data
from oqc.data import augment
from oqc.data.dataset import Dataset, Split

VIEW = ("crop_y", "crop_x", "flip", "cutout_y", "cutout_x")
MIX = ("beta_u", "beta_v", "box_y", "box_x", "choice")


class Batches:
    """A split on a device, served in shuffled augmented batches.

    `batch` is the global batch; each of `world` ranks serves its slice. Order and augmentation are functions of
    (seed, epoch, index) and (seed, step, position in the global batch): the same for every model, device and world
    size, and after a resume. Everything after `__init__` is device work without a host sync.

    Per sample, in this order: random crop (padded with black), flip, normalise, cutout (a square of the mean colour,
    clipped at the border), then mixup or cutmix with another sample of the global batch, which has its own crop, flip
    and cutout. With both mixup and cutmix on, each sample gets one of them with equal chance.
    """

    def __init__(
        self,
        split: Split,
        dataset: Dataset,
        config: Data,
        *,
        batch: int,
        seed: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 1 <= batch <= len(split.labels):
            raise ValueError(f"batch must be 1 to {len(split.labels)} (the images of this split), got {batch}")
        if batch % world:
            raise ValueError(f"batch must be a multiple of the number of processes, got batch {batch} with {world}")
        self.config, self.batch, self.dtype = config, batch, dtype
        self.steps_per_epoch = len(split.labels) // batch
        self._images, self._labels = split.images.to(device), split.labels.to(device)
        self._normalise = Normalise(dataset, device, dtype)
        self._channels, self._rows, self._cols = (torch.arange(k, device=device) for k in split.images.shape[1:])

        local = batch // world
        self._position = torch.arange(rank * local, (rank + 1) * local, device=device)  # in the global batch
        self._ones = torch.ones(local, device=device)
        self._index = torch.arange(len(split.labels), device=device)
        self._order = self._index.clone()
        self._shuffle = seeding.key(seed, "shuffle")
        self._offset = seeding.key(seed, "augment", "offset")
        self._view_streams = _streams(seed, VIEW, device)
        self._mix_streams = _streams(seed, MIX, device)
        self._compiled_view: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.start_epoch(0)

    def compile(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Lets `next` run what `compiler` makes of its code, where that cannot change a bit: all but mixup and cutmix,
        whose weights are drawn with a power and a cosine and whose sum a compiler may round differently."""
        self._compiled_view = compiler(type(self)._view)  # the class's, so that equal batches share what is compiled

    def start_epoch(self, epoch: int) -> None:
        """Writes this epoch's permutation in place, where a captured `next` reads it."""
        hashes = seeding.mix(seeding.mix(self._index + self._shuffle) + epoch)  # a bijection: no ties
        self._order.copy_(hashes.argsort())

    def next(self, step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Images [b, C, H, W], labels_a, labels_b and lam [b] of the global step, an int64 scalar on the device.

        The loss of a sample is lam * loss(labels_a) + (1 - lam) * loss(labels_b).
        """
        view = self._view if self._compiled_view is None else functools.partial(self._compiled_view, self)
        x, labels = view(step, self._position)
        if not (self.config.mixup or self.config.cutmix):
            return x.to(self.dtype), labels, labels, self._ones
        offset = 1 + augment.below(seeding.uniform(self._offset, step), self.batch - 1)
        other, other_labels = view(step, (self._position + offset) % self.batch)
        keep, lam = self._blend(step)
        x = torch.lerp(other, x, keep.to(x.dtype))
        return x.to(self.dtype), labels, other_labels, lam

    def _view(self, step: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """The samples at these positions of the global batch, normalised, each with its own crop, flip and cutout."""
        crop, flip, cutout = self.config.crop, self.config.flip, self.config.cutout
        H, W = self._images.shape[-2:]
        index = self._order[step % self.steps_per_epoch * self.batch + position]
        if crop or flip or cutout:
            crop_y, crop_x, mirror, cut_y, cut_x = seeding.uniform(0, step + self._view_streams, position)
        if crop or flip:
            rows, cols = self._rows.expand(len(index), H), self._cols.expand(len(index), W)
            if flip:
                cols = torch.where(mirror[:, None] < 0.5, W - 1 - cols, cols)
            if crop:
                rows = rows + (augment.below(crop_y, 2 * crop + 1) - crop)[:, None]
                cols = cols + (augment.below(crop_x, 2 * crop + 1) - crop)[:, None]
            pixels = augment.window(self._images, index, self._channels, rows, cols)
        else:
            pixels = self._images[index]
        x = self._normalise(pixels)
        if cutout:
            cut_y, cut_x = augment.below(cut_y, H), augment.below(cut_x, W)
            x = x * ~augment.box(cut_y, cut_x, cutout, cutout, self._rows, self._cols)
        return x, self._labels[index]

    def _blend(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """The share of each sample itself: a pixel map that broadcasts to [b, 1, H, W], and its mean lam [b]."""
        H, W = self._images.shape[-2:]
        u, v, box_y, box_x, choice = seeding.uniform(0, step + self._mix_streams, self._position)
        if self.config.mixup:
            lam = augment.symmetric_beta(u, v, self.config.mixup).float()
            keep = lam[:, None, None, None]
        if self.config.cutmix:
            side = (1 - augment.symmetric_beta(u, v, self.config.cutmix)).sqrt()
            tall, wide = (side * H).long(), (side * W).long()
            box_y, box_x = augment.below(box_y, H), augment.below(box_x, W)
            outside = ~augment.box(box_y, box_x, tall, wide, self._rows, self._cols)
            area = outside.sum((1, 2, 3)) / (H * W)  # of the clipped box
            if not self.config.mixup:
                return outside, area
            cut = choice < 0.5
            lam = torch.where(cut, area, lam)
            keep = torch.where(cut[:, None, None, None], outside.float(), keep)
        return keep, lam


class Normalise:
    """uint8 [b, C, H, W] to (x / 255 - mean) / std, written so that no device can fuse and round it differently."""

    def __init__(self, dataset: Dataset, device: torch.device | str, dtype: torch.dtype) -> None:
        self.work = torch.promote_types(dtype, torch.float32)
        mean = torch.tensor(dataset.mean, dtype=torch.float64) * 255
        scale = 1 / (torch.tensor(dataset.std, dtype=torch.float64) * 255)
        self.mean = mean.to(device, self.work)[:, None, None]
        self.scale = scale.to(device, self.work)[:, None, None]

    def __call__(self, pixels: Tensor) -> Tensor:
        return (pixels.to(self.work) - self.mean) * self.scale


def eval_batches(
    split: Split,
    dataset: Dataset,
    *,
    batch: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    world: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised images and labels in order, at most `batch` at a time; over all ranks every image exactly once."""
    normalise = Normalise(dataset, device, dtype)
    n = len(split.labels)
    first, end = n * rank // world, n * (rank + 1) // world
    for start in range(first, end, batch):
        part = slice(start, min(start + batch, end))
        yield normalise(split.images[part].to(device)).to(dtype), split.labels[part].to(device)


def _streams(seed: int, kinds: tuple[str, ...], device: torch.device | str) -> Tensor:
    """One stream a kind, [K, 1]: all kinds are drawn in one call."""
    return torch.tensor([[seeding.key(seed, "augment", kind)] for kind in kinds], device=device)
