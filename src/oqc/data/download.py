"""Downloads that resume, are checked, and appear under their name only when whole."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn

from oqc.data.pack import checksum, make_folder
from oqc.files import locked

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte
TRIES = 3  # connections in a row that bring nothing new
PAUSE = 2.0  # seconds between those
LIMIT = 2 << 30  # bytes; no official archive is near


def download(url: str, target: Path, md5: str) -> None:
    """Fetches `url` to `target` by way of `target`.part, from where a later call goes on if this one is cut short."""
    make_folder(target.parent)
    part = target.with_name(f"{target.name}.part")
    with locked(target.with_name(f"{target.name}.lock")):
        if target.exists():  # another process, started at the same time, was faster
            return
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with part.open("ab") as out, Progress("{task.description}", *columns, console=Console(stderr=True)) as progress:
            _fetch(url, out, progress, progress.add_task(target.name, total=None))
        got = checksum(part, "md5")
        if got != md5:
            part.unlink()
            raise ValueError(f"{url}: md5 is {got}, expected {md5}; what was fetched is deleted")
        part.replace(target)


def _fetch(url: str, out: IO[bytes], progress: Progress, task: TaskID) -> None:
    """Connects again, from where it stopped, until all is there or nothing more comes."""
    idle = 0
    while True:
        before, reason = out.tell(), "the connection closed early"
        try:
            if _receive(url, out, progress, task):
                return
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:  # nothing after what is there: the checksum decides
                return
            raise ValueError(f"{url} can't be fetched: HTTP {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error)
        idle = 0 if out.tell() > before else idle + 1
        if idle == TRIES:
            raise ValueError(
                f"{url} can't be fetched: {reason}; {out.tell()} bytes are kept, the next try goes on from there"
            )
        time.sleep(PAUSE * idle)


def _receive(url: str, out: IO[bytes], progress: Progress, task: TaskID) -> bool:
    """One connection; True when it brought the file to its end."""
    offset = out.tell()
    headers = {"User-Agent": "oqc"} | ({"Range": f"bytes={offset}-"} if offset else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
        if offset and not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
            out.truncate(0)  # the server sends the whole file
            out.seek(0)
            offset = 0
        length = response.headers.get("Content-Length")
        total = offset + int(length) if length else None
        progress.update(task, total=total, completed=offset)
        while chunk := response.read1(CHUNK):
            out.write(chunk)
            progress.advance(task, len(chunk))
            if out.tell() > LIMIT:
                out.truncate(0)
                raise ValueError(f"{url} is larger than {LIMIT >> 20} MiB, which no known data set is")
    return total is None or out.tell() == total
