"""From the name of a data set to its pack: where it lies, in which layout, who reads it."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from oqc.config import nearest
from oqc.data import arrays, cifar, folders, images, pack
from oqc.data.archives import Files, open_archive, open_folder
from oqc.data.download import download
from oqc.data.raw import Raw
from oqc.files import expanded


@dataclass(frozen=True)
class Layout:
    """One published form of a set: an archive with one folder in it, or that folder."""

    folder: str
    archive: str
    md5: str
    marker: str  # a file that only this layout has
    read: Callable[[Files], Raw]


@dataclass(frozen=True)
class Official:
    url: str  # of the folder with the archives
    layouts: tuple[Layout, ...]  # the first is the one to download


TORONTO = "https://www.cs.toronto.edu/~kriz"
OFFICIAL = {
    "cifar10": Official(
        TORONTO,
        (
            Layout(
                folder="cifar-10-batches-bin",
                archive="cifar-10-binary.tar.gz",
                md5="c32a1d4ab5d03f1284b67883e8d87530",
                marker="data_batch_1.bin",
                read=partial(cifar.read_binary, cifar.CIFAR10),
            ),
            Layout(
                folder="cifar-10-batches-py",
                archive="cifar-10-python.tar.gz",
                md5="c58f30108f718f92721af3b95e74349a",
                marker="data_batch_1",
                read=partial(cifar.read_pickled, cifar.CIFAR10),
            ),
        ),
    ),
    "cifar100": Official(
        TORONTO,
        (
            Layout(
                folder="cifar-100-binary",
                archive="cifar-100-binary.tar.gz",
                md5="03b5dce01913d631647c71ecec9e9cb8",
                marker="train.bin",
                read=partial(cifar.read_binary, cifar.CIFAR100),
            ),
            Layout(
                folder="cifar-100-python",
                archive="cifar-100-python.tar.gz",
                md5="eb9058c3a382ffc7106e4002c42a8d85",
                marker="meta",
                read=partial(cifar.read_pickled, cifar.CIFAR100),
            ),
        ),
    ),
    "tiny-imagenet": Official(
        "https://cs231n.stanford.edu",
        (
            Layout(
                folder="tiny-imagenet-200",
                archive="tiny-imagenet-200.zip",
                md5="90528d7ca1a48142e341f4ef8d21d0de",
                marker="wnids.txt",
                read=partial(folders.read_tiny_imagenet, folders.TinyImageNet()),
            ),
        ),
    ),
}
KNOWN = ("digits", *OFFICIAL)


@dataclass(frozen=True)
class Source:
    """A set that was found: `identity` changes when the files do."""

    name: str
    origin: str
    identity: dict[str, Any]
    read: Callable[[], Raw]


def prepare(name: str, root: str | None = None, image_size: int | None = None) -> Path:
    """The folder of the pack, made now unless it is there already."""
    if image_size is not None and image_size < 1:
        raise ValueError(f"image_size must be at least 1, got {image_size}")
    if name in OFFICIAL and root is None:
        if folder := _packed(name, image_size):
            return folder
        root = str(_downloaded(OFFICIAL[name]))
    source = _source(name, root, image_size)
    folder = pack.place(source.name, source.identity | {"image_size": image_size})
    if not folder.exists():
        raw = images.resized(source.read(), image_size)
        pack.write(folder, raw, name=source.name, origin=source.origin, image_size=image_size)
    return folder


def command(manifest: dict[str, Any]) -> str:
    """What makes a pack again, from what it was made from; an official set whose files are gone is downloaded."""
    name, source, size = manifest["name"], manifest["source"], manifest["image_size"]
    given = [name] if name in KNOWN else [source]
    given += ["--root", source] if name in OFFICIAL and Path(source).exists() else []
    given += ["--image-size", str(size)] if size else []
    return shlex.join(["oqc", "data", "prepare", *given])


def _source(name: str, root: str | None, image_size: int | None) -> Source:
    if name == "digits":
        if root is not None:
            raise ValueError(f"root is not for digits, which come with scikit-learn; got {root}")
        return Source(name, "scikit-learn", {}, arrays.read_digits)
    base = expanded("root", root or "")
    if name in OFFICIAL:
        path, read = _locate(OFFICIAL[name], base)
    else:
        path = base / expanded("data name", name)
        if name and path.is_dir():
            read = partial(folders.read_image_folder, path, image_size)
        elif path.is_file() and path.suffix == ".npz":
            read = partial(arrays.read_npz, path)
        elif os.sep in name or path.exists():
            is_what = "is neither an image folder nor an .npz file" if path.exists() else "does not exist"
            raise ValueError(f"data {path} {is_what}")
        else:
            raise ValueError(
                f"data name must be one of {', '.join(KNOWN)}, an image folder or an .npz file,"
                f" got {name!r}{nearest(name, KNOWN)}"
            )
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", path.resolve().stem).strip("-") or "data"
        name = f"{stem}-files" if stem in KNOWN else stem
    path = path.resolve()
    return Source(name, str(path), {"path": str(path), "state": _state(path)}, read)


def _locate(official: Official, root: Path) -> tuple[Path, Callable[[], Raw]]:
    """The archive or folder of an official set, which is `root` or lies in it, and its reader."""
    if root.is_file():
        return root, partial(_read_archive, root, official)
    for layout in official.layouts:
        for folder in (root, root / layout.folder):
            if (folder / layout.marker).is_file():
                return folder, partial(_read_folder, folder, layout)
    for layout in official.layouts:
        if (root / layout.archive).is_file():
            return root / layout.archive, partial(_read_archive, root / layout.archive, official)
    wanted = ", ".join(f"{layout.folder}/, {layout.archive}" for layout in official.layouts)
    raise ValueError(f"root must be or hold one of {wanted}; nothing of this is at {root.absolute()}")


def _read_folder(path: Path, layout: Layout) -> Raw:
    return layout.read(open_folder(path))


def _read_archive(path: Path, official: Official) -> Raw:
    md5 = pack.checksum(path, "md5")
    for layout in official.layouts:
        if layout.md5 == md5:
            return layout.read(open_archive(path, layout.folder))
    expected = " or ".join(f"{layout.md5} ({layout.archive})" for layout in official.layouts)
    raise ValueError(f"{path}: md5 is {md5}, expected {expected}; the archive is damaged or not the official one")


def _state(path: Path) -> str:
    """Hash of the size and time of change of every file."""
    files = [f"{path}/{name}" for name in open_folder(path).names] if path.is_dir() else [str(path)]
    stats = ((file, os.stat(file)) for file in files)
    state = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    return hashlib.sha256(repr(state).encode()).hexdigest()


def _packed(name: str, image_size: int | None) -> Path | None:
    """The pack of an official set that is in the cache already, whatever it was made from."""
    manifests = {folder: pack.read_manifest(folder) for folder in pack.find(name)}
    wanted = (name, image_size)
    fitting = {folder: found for folder, found in manifests.items() if (found["name"], found["image_size"]) == wanted}
    if len({found["digest"] for found in fitting.values()}) > 1:
        sources = ", ".join(str(found["source"]) for found in fitting.values())
        raise ValueError(f"the cache holds packs of {name} that differ; give root to choose one of {sources}")
    return next(iter(fitting), None)


def _downloaded(official: Official) -> Path:
    layout = official.layouts[0]
    target = pack.cache() / "downloads" / layout.archive
    if not target.exists():
        download(f"{official.url}/{layout.archive}", target, layout.md5)
    return target
