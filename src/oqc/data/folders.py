"""Sets of image files: any ImageFolder tree, and Tiny ImageNet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from oqc.data import images
from oqc.data.archives import UNUSED, Files, open_folder
from oqc.data.raw import Raw, divide

LIKE_PARTS = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


def read_image_folder(path: Path, image_size: int | None) -> Raw:
    """train/<class>/* and test/<class>/* (without it val/); or <class>/* alone, of which a fixed fifth is the test
    part."""
    files = open_folder(path)
    if not (path / "train").is_dir():
        classes = _classes(path)
        parts = [one for one in classes if one.lower() in LIKE_PARTS and any(_folders(path / one))]
        if parts:  # taken for classes, they would be what is learned
            raise ValueError(f"{path} has {', '.join(parts)} with folders in it: name the parts train, and test or val")
        names, labels = _labelled(files, "", classes, classes)
        return divide(images.decode(files, names, image_size), labels, classes)
    part = next((part for part in ("test", "val") if (path / part).is_dir()), None)
    if part is None:
        raise ValueError(f"{path} has a folder train, but neither test nor val beside it")
    classes, tested = _classes(path / "train"), _classes(path / part)
    if unknown := sorted(set(tested) - set(classes)):
        raise ValueError(f"{path / part}: class {unknown[0]!r} is not a folder of {path / 'train'}")
    train_names, train_labels = _labelled(files, "train/", classes, classes)
    test_names, test_labels = _labelled(files, f"{part}/", tested, classes)
    pixels = images.decode(files, train_names + test_names, image_size)
    return Raw(pixels[: len(train_names)], train_labels, pixels[len(train_names) :], test_labels, classes)


def _folders(folder: Path) -> Iterator[str]:
    """Those in it, without hidden ones and links around in a circle."""
    above = (folder.resolve(), *folder.resolve().parents)
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.name.startswith(".") and entry.name != UNUSED and entry.resolve() not in above:
            yield entry.name


def _classes(folder: Path) -> tuple[str, ...]:
    classes = sorted(_folders(folder))
    if not classes:
        raise ValueError(f"{folder} has no class folders; expected <class>/<image> in it")
    return tuple(classes)


def _labelled(
    files: Files, prefix: str, folders: Sequence[str], classes: Sequence[str]
) -> tuple[list[str], np.ndarray]:
    """Image names under `prefix` by class folder, and their labels."""
    members: dict[str, list[str]] = {folder: [] for folder in folders}
    for name in files.names:
        folder, _, rest = name.removeprefix(prefix).partition("/")
        if name.startswith(prefix) and rest and folder in members and name.lower().endswith(SUFFIXES):
            members[folder].append(name)
    for folder, names in members.items():
        if not names:
            raise ValueError(
                f"{files.origin}: class {prefix + folder!r} is empty: no image files ({' '.join(SUFFIXES)})"
            )
    labels = [np.full(len(names), classes.index(folder)) for folder, names in members.items()]
    return [name for names in members.values() for name in names], np.concatenate(labels)


@dataclass(frozen=True)
class TinyImageNet:
    """How much the official set holds."""

    classes: int = 200
    train: int = 100_000
    test: int = 10_000  # the part called val: the labels of the one called test were never published


def read_tiny_imagenet(tiny: TinyImageNet, files: Files) -> Raw:
    wnids = sorted(files.lines("wnids.txt"))
    if len(set(wnids)) != tiny.classes:
        raise ValueError(f"{files.origin}: wnids.txt must list {tiny.classes} classes, got {len(set(wnids))}")
    label = {wnid: place for place, wnid in enumerate(wnids)}
    words = dict(line.split("\t", 1) for line in files.lines("words.txt") if "\t" in line)
    train: list[tuple[str, str]] = []  # name, class
    for name in files.names:
        match PurePosixPath(name).parts:
            case ("train", wnid, "images", image) if image.endswith(".JPEG"):
                train.append((name, wnid))
    test = [(f"val/images/{row[0]}", row[1]) for row in map(str.split, files.lines("val/val_annotations.txt"))]
    for part, rows, count in (("train", train, tiny.train), ("val", test, tiny.test)):
        if len(rows) != count:
            raise ValueError(f"{files.origin}: the {part} part must have {count} images, got {len(rows)}")
        if strange := next((row for row in rows if row[1] not in label), None):
            raise ValueError(f"{files.origin}: {strange[0]} has class {strange[1]!r}, which is not in wnids.txt")
    pixels = images.decode(files, [name for name, _ in train + test], None)
    labels = np.array([label[wnid] for _, wnid in train + test])
    n = len(train)
    classes = tuple(words.get(wnid, wnid).split(",")[0] for wnid in wnids)
    return Raw(pixels[:n], labels[:n], pixels[n:], labels[n:], classes)
