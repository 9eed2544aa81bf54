"""Image files to uint8 arrays, on all cores, and resizing."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from oqc.data.archives import Files
from oqc.data.raw import Raw

S = TypeVar("S")
T = TypeVar("T")

NAMED = 3  # unreadable files that an error names
CHUNK = 64  # images a task


def eight_bit(image: Image.Image) -> Image.Image:
    """Sixteen-bit grey images in eight bits; Pillow's own conversion would cut everything above 255 off. Where nothing
    tells what is white, as of floats and of TIFF's 32 bits, that is an error."""
    tiff = getattr(image, "tag_v2", {})  # tag 258: bits of a pixel
    if image.mode == "F" or (image.mode == "I" and max(tiff.get(258, (16,))) > 16):
        kind = "floats" if image.mode == "F" else "of 32 bits"
        raise ValueError(f"its pixels are {kind}, and must be whole numbers of 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))


def decode(files: Files, names: Sequence[str], image_size: int | None) -> np.ndarray:
    """The images as RGB [n, 3, H, W]: resized if `image_size` is given, else all must be of one size."""

    def attempt(name: str) -> np.ndarray | str:
        try:
            with Image.open(io.BytesIO(files.read(name))) as image:
                rgb = eight_bit(image).convert("RGB")
            return np.asarray(fit(rgb, image_size) if image_size else rgb).transpose(2, 0, 1)
        except Exception as error:  # on damaged files the decoders fail in many ways
            told = "no image format is known for it" if isinstance(error, UnidentifiedImageError) else error
            return f"{name} ({told})"

    out, bad, odd = np.empty((0, 3, 0, 0), dtype=np.uint8), [], ""
    for place, image in enumerate(_parallel(attempt, names)):
        if isinstance(image, str):
            bad.append(image)
            continue
        if not len(out):
            out, first = np.empty((len(names), *image.shape), dtype=np.uint8), names[place]
        if image.shape == out.shape[1:]:
            out[place] = image
        else:
            odd = odd or f"{first} is {_size(out)}, {names[place]} is {_size(image)}"
    if bad:
        raise ValueError(
            f"{files.origin}: {len(bad)} of {len(names)} images can't be read: {'; '.join(bad[:NAMED])}"
            + ("; ..." if len(bad) > NAMED else "")
        )
    if odd:
        raise ValueError(
            f"{files.origin}: the images are not of one size ({odd}); data.image_size=N resizes them (of `oqc data"
            " prepare`: --image-size N)"
        )
    return out


def fit(image: Image.Image, size: int) -> Image.Image:
    """The shorter side to `size`, antialiased, then the centre square."""
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return resized.crop((left, top, left + size, top + size))


def resized(raw: Raw, image_size: int | None) -> Raw:
    """The same set with square images of `image_size`; unchanged when they already are, or when it is None."""
    if image_size is None or raw.train_images.shape[2:] == (image_size, image_size):
        return raw

    def one(image: np.ndarray) -> np.ndarray:
        channels = [np.asarray(fit(Image.fromarray(channel), image_size)) for channel in image]
        return np.stack(channels)

    return dataclasses.replace(
        raw,
        train_images=np.stack(list(_parallel(one, list(raw.train_images)))),
        test_images=np.stack(list(_parallel(one, list(raw.test_images)))),
    )


def _parallel(function: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """Results in order; Pillow releases the GIL while it decodes and resizes."""
    chunks = (items[start : start + CHUNK] for start in range(0, len(items), CHUNK))
    with ThreadPoolExecutor(_cores()) as pool:
        for results in pool.map(lambda chunk: [function(item) for item in chunk], chunks):
            yield from results


def _cores() -> int | None:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _size(image: np.ndarray) -> str:
    return f"{image.shape[-1]}x{image.shape[-2]}"
