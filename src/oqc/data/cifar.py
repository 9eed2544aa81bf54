"""CIFAR-10 and CIFAR-100 in their official layouts: binary records, or pickles written by Python 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oqc.data import unpickle
from oqc.data.archives import Files
from oqc.data.raw import Raw

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Cifar:
    """What the official files of one set are called and hold."""

    train_files: tuple[str, ...]
    test_file: str
    train: int  # images in all train files
    test: int
    classes: int
    binary_names: str  # text file with the class names
    pickled_names: tuple[str, bytes]  # pickle with the class names, and the key
    label_key: bytes
    label_bytes: int  # before the pixels of a binary record; the last one is the label


CIFAR10 = Cifar(
    train_files=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test_file="test_batch",
    train=50_000,
    test=10_000,
    classes=10,
    binary_names="batches.meta.txt",
    pickled_names=("batches.meta", b"label_names"),
    label_key=b"labels",
    label_bytes=1,
)
CIFAR100 = Cifar(
    train_files=("train",),
    test_file="test",
    train=50_000,
    test=10_000,
    classes=100,
    binary_names="fine_label_names.txt",
    pickled_names=("meta", b"fine_label_names"),
    label_key=b"fine_labels",
    label_bytes=2,  # coarse, then fine
)


def read_binary(cifar: Cifar, files: Files) -> Raw:
    size = cifar.label_bytes + PIXELS

    def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
        data = files.read(f"{name}.bin")
        if len(data) % size:
            raise ValueError(f"{files.origin}: {name}.bin must be records of {size} bytes, got {len(data)} bytes")
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, size)
        return records[:, cifar.label_bytes :], records[:, cifar.label_bytes - 1]

    return _assemble(cifar, files, batch, files.lines(cifar.binary_names))


def read_pickled(cifar: Cifar, files: Files) -> Raw:
    def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
        content = unpickle.loads(files.read(name), f"{files.origin}: {name}")
        pixels, labels = content.get(b"data"), content.get(cifar.label_key)
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (PIXELS,):
            raise ValueError(f"{files.origin}: {name} must hold 'data', a uint8 array of rows of {PIXELS} pixels")
        if not isinstance(labels, list) or not all(isinstance(label, int) and abs(label) < 1 << 31 for label in labels):
            raise ValueError(f"{files.origin}: {name} must hold {cifar.label_key.decode()!r}, a list of whole numbers")
        return pixels, np.array(labels, dtype=np.int64)

    file, key = cifar.pickled_names
    names = unpickle.loads(files.read(file), f"{files.origin}: {file}").get(key)
    if not isinstance(names, list) or not all(isinstance(name, bytes | str) for name in names):
        raise ValueError(f"{files.origin}: {file} must hold {key.decode()!r}, a list of names")
    return _assemble(cifar, files, batch, [n.decode() if isinstance(n, bytes) else n for n in names])


def _assemble(
    cifar: Cifar, files: Files, batch: Callable[[str], tuple[np.ndarray, np.ndarray]], classes: list[str]
) -> Raw:
    def part(name: str, batches: tuple[str, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
        pixels, labels = (np.concatenate(column) for column in zip(*map(batch, batches), strict=True))
        if (len(pixels), len(labels)) != (count, count):
            raise ValueError(
                f"{files.origin}: the {name} part must have {count} images and labels,"
                f" got {len(pixels)} images and {len(labels)} labels"
            )
        return pixels.reshape(-1, 3, 32, 32), labels.astype(np.int64)

    if len(classes) != cifar.classes:
        raise ValueError(f"{files.origin}: {cifar.classes} class names expected, got {len(classes)}")
    return Raw(
        *part("train", cifar.train_files, cifar.train), *part("test", (cifar.test_file,), cifar.test), tuple(classes)
    )
