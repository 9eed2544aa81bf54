"""Files that are written whole or not at all, whether they could be, locks, and paths as a user gives them."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

PARTIAL = r"\.[0-9a-f]{8}\.tmp"  # what `write_whole` adds to a name until the file is there whole


def write_whole(path: Path, content: str | bytes) -> None:
    """Puts `content` in place of what is at `path`, in one step, on disk before this returns: after a crash either the
    old or the new is there. Folders are made as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path), open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Brings to the disk which files are in it."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def locked(file: Path, taken: str | None = None) -> Iterator[None]:
    """Holds the lock `file`, which the system frees when this process ends. Where another holds it, waits or, with
    `taken`, raises that."""
    with file.open("w") as handle:
        try:
            import fcntl
        except ImportError:  # not a POSIX system
            pass
        else:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if taken else 0))
            except BlockingIOError:
                raise ValueError(taken) from None
        yield


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Lets an error that tells no file, as that of a full disk, tell that it is about `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:  # numpy's
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def as_path(what: str, given: str | Path) -> Path:
    """What is given as `what`, where it names a place."""
    if not isinstance(given, (str, os.PathLike)):
        raise ValueError(f"{what} must be a str or a Path, got {given!r}")
    return Path(given)


def expanded(what: str, path: str) -> Path:
    """The path that is given as `what`, with the home folder that it may begin with in place of its `~`."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        home = Path(path).parts[0]
        raise ValueError(f"{what} must be a path, got {path!r}, but there is no home folder {home}") from None


def check_folder(what: str, folder: Path) -> None:
    """Raises, naming `what` wants it, where no file could be written in `folder`, which need not be there yet."""
    above = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.exists(one))
    if not above.is_dir():
        raise ValueError(f"{what} must be a folder that can be written, but {above} is a file")
    try:
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError
        with tempfile.TemporaryFile(dir=above):  # root may do all, and yet /proc or a read-only disk takes no file
            pass
    except OSError:
        raise ValueError(f"{what} must be a folder that can be written, but {above} cannot be") from None
