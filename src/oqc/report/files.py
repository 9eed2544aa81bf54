"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Puts `text` in place of what is at `path`, in one step; folders are made as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def check_place(option: str, path: Path) -> None:
    """Raises, by the option's name, where a file could not be written at `path` once the time has come."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise ValueError(f"{option} must be a file, got {path}, which is a folder")
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "cannot be written" if above.is_dir() else "is a file"
        raise ValueError(f"{option} {path}: {above} {why}")
