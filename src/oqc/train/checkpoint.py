"""Checkpoints on disk: tensors in safetensors, the rest in JSON, one digest over both.

`<name>.safetensors` is written before `<name>.json`, each to a temporary file that is flushed to the disk and renamed,
so a checkpoint whose JSON is there is whole unless the disk damaged it, which the digest tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from oqc.files import PARTIAL, write_whole
from oqc.train.summary import best_row

KEPT = 2  # of the newest, beside the best
_NAME = re.compile(r"(step|best)-(\d{9})")
_FILE = re.compile(rf"(?P<name>{_NAME.pattern})\.(json|safetensors)(?P<partial>{PARTIAL})?")

Record = dict[str, Any]


class Damaged(ValueError):
    """A checkpoint that cannot be read or whose digest is wrong; the message names the file."""


def write(folder: Path, name: str, tensors: dict[str, Tensor], record: Record) -> None:
    data = safetensors.torch.save(tensors)
    write_whole(folder / f"{name}.safetensors", data)
    content = {"sha256": _digest(data, record), **record}
    write_whole(folder / f"{name}.json", json.dumps(content, indent=1).encode())


def read(folder: Path, name: str) -> tuple[dict[str, Tensor], Record]:
    """Tensors and record of a checkpoint; `Damaged` names the file that is at fault."""
    path = folder / f"{name}.json"
    try:
        record: Record = json.loads(path.read_bytes())
        digest = record.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"checkpoint {path} is damaged: it is not the JSON record of a checkpoint") from error
    path = folder / f"{name}.safetensors"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Damaged(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if _digest(data, record) != digest:
        raise Damaged(f"checkpoint {path} is damaged: its digest is not the one in {name}.json")
    return safetensors.torch.load(data), record


def _digest(data: bytes, record: Record) -> str:
    digest = hashlib.sha256(data)
    digest.update(json.dumps(record, sort_keys=True).encode())
    return digest.hexdigest()


def names(folder: Path, kind: str) -> list[str]:
    """Checkpoints of a kind (`step` or `best`), newest first."""
    found = (_NAME.fullmatch(path.stem) for path in folder.glob("*.json"))
    return sorted((match[0] for match in found if match and match[1] == kind), reverse=True)


def read_newest(folder: Path, kind: str = "step") -> tuple[str, dict[str, Tensor], Record, list[str]] | None:
    """The newest whole checkpoint of a kind, its name first, and a warning for each damaged one passed over; None where
    there is none at all."""
    damaged: list[str] = []
    for name in names(folder, kind):
        try:
            return name, *read(folder, name), [f"{text}; going back to {name}" for text in damaged]
        except Damaged as error:
            damaged.append(str(error))
    if damaged:
        raise Damaged(damaged[0])
    return None


def prune(folder: Path, best: int | None) -> None:
    """Removes all but the newest two, the best, and whatever is not ours; JSON first, so that none is left half.

    The best is that of this step, where it is there. A later one may be of an evaluation that the run no longer has,
    after a kill or where what was saved is damaged: it is kept while it is the only one.
    """
    every = names(folder, "best")
    ours = [name for name in every if best is not None and int(name.removeprefix("best-")) == best]
    keep = {*names(folder, "step")[:KEPT], *(ours or every)[:1]}
    for path, found in _files(folder):
        if found["name"] not in keep or found["partial"]:
            path.unlink()


def clear(folder: Path) -> None:
    """Removes every checkpoint, and the folder where it holds nothing else."""
    for path, _ in _files(folder):
        path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _files(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """The files that are ours, in the order in which they may go."""
    found = ((path, _FILE.fullmatch(path.name)) for path in sorted(folder.glob("*")))
    return [(path, match) for path, match in found if match]


class Writer:
    """Writes checkpoints in a thread of its own, one at a time; `wait` raises what went wrong there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="oqc-checkpoint")
        self._pending: Future[None] | None = None

    def save(self, checkpoints: dict[str, dict[str, Tensor]], record: Record) -> None:
        """Checkpoints by name, in the order in which they are to be written, on the CPU and not changed later."""
        self.wait()
        self._pending = self._pool.submit(self._save, checkpoints, record)

    def _save(self, checkpoints: dict[str, dict[str, Tensor]], record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, tensors in checkpoints.items():
            write(self.folder, name, tensors, record)
        history = record["history"]
        prune(self.folder, best_row(history)["step"] if history else None)

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        self._pool.shutdown()


def to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that neither training nor each other can change."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def parameter_hash(model: nn.Module) -> str:
    """sha256 over names, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
