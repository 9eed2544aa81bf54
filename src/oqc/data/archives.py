"""Files of a data set, from a folder or streamed out of an archive: nothing is ever extracted to disk."""

from __future__ import annotations

import gzip
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

UNUSED = "lost+found"  # a file system keeps it for itself
CAP = 2 << 30  # bytes an archive may hold when unpacked


@dataclass(frozen=True)
class Files:
    """Names relative to the top of the data set, and how to read one."""

    origin: Path
    names: tuple[str, ...]
    get: Callable[[str], bytes]

    def read(self, name: str) -> bytes:
        try:
            return self.get(name)
        except (KeyError, FileNotFoundError):
            raise ValueError(f"{self.origin} has no file {name}") from None
        except OSError as error:
            raise ValueError(f"{self.origin}: {name} can't be read: {error}") from None

    def lines(self, name: str) -> list[str]:
        """The lines of a text file that are not empty."""
        return [line.strip() for line in self.read(name).decode("utf-8", "replace").splitlines() if line.strip()]


def open_folder(path: Path) -> Files:
    """Hidden files and folders are left out, and so are links that lead nowhere or around in a circle, and `UNUSED`."""
    names: list[str] = []
    above: dict[str, tuple[str, ...]] = {str(path): ()}  # of a folder: where those it lies in really are
    for folder, inner, files in os.walk(path, onerror=_unreadable, followlinks=True):
        around = (*above.pop(folder), os.path.realpath(folder))
        shown = [name for name in inner if not name.startswith(".") and name != UNUSED]
        inner[:] = [name for name in shown if os.path.realpath(f"{folder}/{name}") not in around]
        above |= {os.path.join(folder, name): around for name in inner}
        prefix = Path(folder).relative_to(path).as_posix()
        files = [name for name in files if not name.startswith(".") and os.path.exists(f"{folder}/{name}")]
        names += files if prefix == "." else [f"{prefix}/{name}" for name in files]
    return Files(path, tuple(sorted(names)), lambda name: (path / name).read_bytes())


def _unreadable(error: OSError) -> None:
    """A folder that cannot be listed is not an empty one."""
    raise ValueError(f"{error.filename} can't be read: {error.strerror}") from None


def open_archive(path: Path, top: str, cap: int = CAP) -> Files:
    """The files under the folder `top` of a .tar.gz or .zip, in memory."""
    with path.open("rb") as file:
        members = _zip_members(path, cap) if file.read(2) == b"PK" else _tar_members(path, cap)
    try:
        contents = {name.removeprefix(f"{top}/"): data for name, data in members if name.startswith(f"{top}/")}
    except (EOFError, OSError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from None
    return Files(path, tuple(sorted(contents)), contents.__getitem__)


def _tar_members(path: Path, cap: int) -> Iterator[tuple[str, bytes]]:
    with _Capped(path, cap) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as tar:
        for member in tar:
            _check_name(path, member.name)
            if member.isdir():
                continue
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is None:
                raise ValueError(f"{path}: {member.name!r} is neither a file nor a folder")
            yield member.name, stream.read()


def _zip_members(path: Path, cap: int) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as file:
        if sum(member.file_size for member in file.infolist()) > cap:  # zipfile reads no more of a member than this
            raise _too_big(path, cap)
        for member in file.infolist():
            _check_name(path, member.filename)
            if not member.is_dir():
                yield member.filename, file.read(member)


class _Capped(gzip.GzipFile):
    """Refuses to give more than `cap` bytes, whatever the headers of the archive claim."""

    def __init__(self, path: Path, cap: int) -> None:
        super().__init__(path)
        self.path, self.cap, self.given = path, cap, 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.given += len(data)
        if self.given > self.cap:
            raise _too_big(self.path, self.cap)
        return data


def _check_name(path: Path, name: str) -> None:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name or ":" in name:
        raise ValueError(f"{path}: the member {name!r} leaves the folder; the archive is not trusted")


def _too_big(path: Path, cap: int) -> ValueError:
    return ValueError(f"{path} unpacks to more than {cap >> 20} MiB; the archive is not trusted")
