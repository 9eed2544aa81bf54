"""Small sets in the official formats, as files, folders and archives."""

from __future__ import annotations

import dataclasses
import io
import struct
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from oqc.data import Dataset, cifar, folders, sources

SMALL = {
    "cifar10": dataclasses.replace(cifar.CIFAR10, train=50, test=20),
    "cifar100": dataclasses.replace(cifar.CIFAR100, train=200, test=100),
}
FORMS = [(name, form) for name in SMALL for form in ("binary", "python")]
TINY = folders.TinyImageNet(classes=3, train=12, test=6)


@dataclass
class Sample:
    """The files of a small set, by name within its folder, and what reading them must give."""

    files: dict[str, bytes]
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def python2_pickle(content: dict[str, object]) -> bytes:
    """Protocol 2 as Python 2 and its numpy wrote it: byte strings, GLOBAL, REDUCE, BUILD."""

    def dump(value: object) -> bytes:
        match value:
            case str():
                return b"T" + struct.pack("<I", len(value)) + value.encode()
            case bool():
                return b"\x88" if value else b"\x89"
            case int():
                return b"J" + struct.pack("<i", value)
            case list():
                return b"](" + b"".join(map(dump, value)) + b"e"
            case np.ndarray():
                dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN" + dump(-1) * 2 + b"K\x00tb"
                raw = b"T" + struct.pack("<I", value.nbytes) + value.tobytes()
                shape = b"(" + b"".join(dump(side) for side in value.shape) + b"t"
                empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
                return empty + b"(K\x01" + shape + dtype + b"\x89" + raw + b"tb"
        raise TypeError(type(value))

    items = b"".join(dump(key) + dump(value) for key, value in content.items())
    return b"\x80\x02}(" + items + b"u."


def cifar_sample(name: str, form: str) -> Sample:
    spec, rng = SMALL[name], np.random.default_rng(0)
    names = [f"class {i}" for i in range(spec.classes)]
    files: dict[str, bytes] = {}
    parts: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for part, batches, count in (("train", spec.train_files, spec.train), ("test", (spec.test_file,), spec.test)):
        pixels = rng.integers(0, 256, (count, cifar.PIXELS), dtype=np.uint8)
        labels = np.arange(count) % spec.classes
        parts[part] = pixels.reshape(-1, 3, 32, 32), labels
        for batch, rows in zip(batches, np.split(np.arange(count), len(batches)), strict=True):
            if form == "binary":
                coarse = np.full((len(rows), spec.label_bytes - 1), 7)
                records = np.concatenate([coarse, labels[rows, None], pixels[rows]], axis=1).astype(np.uint8)
                files[f"{batch}.bin"] = records.tobytes()
            else:
                content = {"data": pixels[rows], spec.label_key.decode(): labels[rows].tolist(), "batch_label": batch}
                files[batch] = python2_pickle(content)
    if form == "binary":
        files[spec.binary_names] = ("\n".join(names) + "\n\n").encode()
    else:
        files[spec.pickled_names[0]] = python2_pickle({spec.pickled_names[1].decode(): names})
    return Sample(files, *parts["train"], *parts["test"])


def tiny_sample() -> Sample:
    rng = np.random.default_rng(0)
    wnids = [f"n0000000{i}" for i in range(TINY.classes)]
    files = {
        "wnids.txt": "\n".join(reversed(wnids)).encode(),
        "words.txt": "".join(f"{wnid}\tthing {i}, object\n" for i, wnid in enumerate(wnids)).encode(),
        "test/images/test_0.JPEG": b"never read",
    }

    def jpeg() -> tuple[bytes, np.ndarray]:
        out = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(out, "JPEG")
        return out.getvalue(), np.asarray(Image.open(out)).transpose(2, 0, 1)

    pixels: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    train_labels = np.repeat(np.arange(TINY.classes), TINY.train // TINY.classes)
    for i, label in enumerate(train_labels):
        files[f"train/{wnids[label]}/images/{i:03}.JPEG"], image = jpeg()
        pixels["train"].append(image)
    test_labels = np.arange(TINY.test) % TINY.classes
    for i in range(TINY.test):
        files[f"val/images/val_{i}.JPEG"], image = jpeg()
        pixels["val"].append(image)
    rows = [f"val_{i}.JPEG\t{wnids[label]}\t0\t0\t9\t9\n" for i, label in enumerate(test_labels)]
    files["val/val_annotations.txt"] = "".join(rows).encode()
    return Sample(files, np.stack(pixels["train"]), train_labels, np.stack(pixels["val"]), test_labels)


def sample(name: str, form: str) -> Sample:
    return tiny_sample() if name == "tiny-imagenet" else cifar_sample(name, form)


def layout_of(name: str, form: str) -> sources.Layout:
    return sources.OFFICIAL[name].layouts[1 if form == "python" else 0]


def extracted(files: dict[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def archived(files: dict[str, bytes], path: Path, top: str) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in files.items():
                file.writestr(f"{top}/{name}", data)
    else:
        with tarfile.open(path, "w:gz") as tar:
            for name, data in files.items():
                member = tarfile.TarInfo(f"{top}/{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def image_tree(root: Path, parts: tuple[str, ...], size: tuple[int, int] = (8, 8), count: int = 5) -> Path:
    """<part>/<class>/<i>.png: red says the class, green the number."""
    for part in parts:
        for label, name in enumerate(("ant", "bee")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", size, (100 * label, 10 * i, 0)).save(root / part / name / f"{i}.png")
    return root


def same(dataset: Dataset, sample: Sample) -> bool:
    pairs = (
        (dataset.train.images, sample.train_images),
        (dataset.train.labels, sample.train_labels),
        (dataset.test.images, sample.test_images),
        (dataset.test.labels, sample.test_labels),
    )
    return all(np.array_equal(got.numpy(), expected) for got, expected in pairs)
