"""Packs: verified data sets as memory-mapped uint8 arrays beside a manifest, one folder each, in the cache.

A pack is written into a temporary folder beside its place, fsynced and renamed: it is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from oqc.data.raw import Raw, check, moments
from oqc.files import expanded, naming, sync_folder

FORMAT = 1
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
STALE = 24 * 3600  # seconds after which a temporary folder belongs to a process that was killed


def cache() -> Path:
    """Where packs and downloads lie: OQC_DATA, or `oqc` in the user's cache folder."""
    if given := os.environ.get("OQC_DATA"):
        return expanded("OQC_DATA", given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oqc"


def make_folder(folder: Path) -> None:
    """Of the cache, for what comes into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(f"the cache {cache()} cannot be written; set OQC_DATA to another folder")


def packs() -> Path:
    return cache() / f"packs-v{FORMAT}"


def place(name: str, identity: dict[str, Any]) -> Path:
    """The folder of the pack that is made from the source `identity` describes."""
    content = json.dumps(identity, sort_keys=True)
    return packs() / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def write(folder: Path, raw: Raw, *, name: str, origin: str, image_size: int | None) -> None:
    """Checks `raw` and puts it at `folder`; when another process was faster, its pack stays."""
    check(raw, origin)
    temporary = folder.parent / f".tmp-{os.getpid()}-{time.time_ns()}"
    make_folder(folder.parent)
    _sweep(folder.parent)
    temporary.mkdir()
    try:
        with naming(folder):
            mean, std = moments(raw.train_images)
            manifest = {
                "format": FORMAT,
                "name": name,
                "source": origin,
                "image_size": image_size,
                "classes": list(raw.classes),
                "mean": mean,
                "std": std,
                "arrays": {key: _save(temporary / f"{key}.npy", getattr(raw, key)) for key in ARRAYS},
            }
            manifest["digest"] = _digest(manifest)
            with (temporary / "manifest.json").open("wb") as out:
                out.write(json.dumps(manifest, indent=1).encode())
                _sync(out)
        sync_folder(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "manifest.json").exists():
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The manifest and the arrays of a pack; the images are mapped (privately), not read."""
    manifest = read_manifest(folder)
    return manifest, {key: torch.from_numpy(_map(folder, key, manifest)) for key in ARRAYS}


def verify(folder: Path) -> dict[str, Any]:
    """Hashes every array again; the manifest when all is as it was packed."""
    manifest = read_manifest(folder)
    for key in ARRAYS:
        _map(folder, key, manifest)
        file = folder / f"{key}.npy"
        if checksum(file, "sha256") != manifest["arrays"][key]["sha256"]:
            raise _damaged(file, "its sha256 is not the one in the manifest")
    if _digest(manifest) != manifest["digest"]:
        raise _damaged(folder / "manifest.json", "its digest does not fit its content")
    return manifest


def find(name: str = "") -> Iterator[Path]:
    """The packs of this name, or those made from this file or folder; every pack when it is empty."""
    path = expanded("data name", name).resolve()
    for folder in sorted(packs().glob("[!.]*-*")):
        named = not name or folder.name.rpartition("-")[0] == name
        if named or (path.exists() and _source_of(folder) == str(path)):
            yield folder


def _source_of(folder: Path) -> object:
    """What a pack was made from; None where it cannot tell, being damaged."""
    with contextlib.suppress(ValueError):
        return read_manifest(folder)["source"]
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(file, f"it can't be read ({error})") from None
    if not _is_manifest(manifest):
        raise _damaged(file, f"it is no manifest of format {FORMAT}")
    return manifest


def _is_manifest(found: Any) -> bool:
    """Whether it holds what `write` puts there."""
    match found:
        case {
            "format": number,
            "name": str(),
            "source": str(),
            "image_size": int() | None,
            "classes": [*classes],
            "mean": [*mean],
            "std": [*std],
            "arrays": dict(arrays),
            "digest": str(),
        } if number == FORMAT and all(_is_entry(key, arrays.get(key)) for key in ARRAYS):
            channels = arrays["train_images"]["shape"][1]
            moments = all(isinstance(one, (int, float)) for one in (*mean, *std))
            return moments and len(mean) == len(std) == channels and all(isinstance(name, str) for name in classes)
    return False


def _is_entry(key: str, found: Any) -> bool:
    match found:
        case {"shape": [*shape], "bytes": int(), "sha256": str()}:
            return len(shape) == (4 if key.endswith("images") else 1) and all(isinstance(side, int) for side in shape)
    return False


def checksum(file: Path, kind: str) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest()


def _save(file: Path, array: np.ndarray) -> dict[str, Any]:
    array = np.ascontiguousarray(array, dtype=_kind(file.stem))
    with file.open("wb") as out:
        np.save(out, array, allow_pickle=False)
        _sync(out)
    return {"shape": list(array.shape), "bytes": file.stat().st_size, "sha256": checksum(file, "sha256")}


def check_sizes(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises where an array is not as long as it was packed; reads none of them."""
    for key in ARRAYS:
        _check_size(folder / f"{key}.npy", manifest["arrays"][key])


def _check_size(file: Path, entry: dict[str, Any]) -> None:
    size = file.stat().st_size if file.exists() else 0
    if size != entry["bytes"]:
        raise _damaged(file, f"it has {size} bytes, the manifest says {entry['bytes']}")


def _map(folder: Path, key: str, manifest: dict[str, Any]) -> np.ndarray:
    file, entry = folder / f"{key}.npy", manifest["arrays"][key]
    _check_size(file, entry)
    try:
        array = np.load(file, mmap_mode="c", allow_pickle=False)
    except Exception:  # a damaged header can fail in any way
        raise _damaged(file, "its header can't be read") from None
    if list(array.shape) != entry["shape"]:
        raise _damaged(file, f"its shape is {list(array.shape)}, the manifest says {entry['shape']}")
    if array.dtype != _kind(key):
        raise _damaged(file, f"it holds {array.dtype}, not {np.dtype(_kind(key))}")
    return array


def _kind(key: str) -> type[np.generic]:
    return np.uint8 if key.endswith("images") else np.int64


def _damaged(file: Path, what: str) -> ValueError:
    return ValueError(f"{file} is damaged: {what}; delete the folder {file.parent} and prepare the data set again")


def _digest(manifest: dict[str, Any]) -> str:
    """Names the content, wherever it came from."""
    content = [[manifest["arrays"][key]["sha256"] for key in ARRAYS], list(manifest["classes"])]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _sweep(folder: Path) -> None:
    for temporary in folder.glob(".tmp-*"):
        with contextlib.suppress(FileNotFoundError):  # its writer is done
            if time.time() - temporary.stat().st_mtime > STALE:
                shutil.rmtree(temporary, ignore_errors=True)
