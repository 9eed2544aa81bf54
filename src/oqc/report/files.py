"""Files that are written whole or not at all, and whether they could be."""

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


def check_folder(what: str, folder: Path) -> None:
    """Raises, naming `what` wants it, where no file could be written in `folder`, which need not be there yet."""
    above = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not above.is_dir():
        raise ValueError(f"{what} must be a folder that can be written, but {above} is a file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{what} must be a folder that can be written, but {above} cannot be")
