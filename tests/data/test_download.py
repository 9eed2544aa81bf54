"""Downloads against a server on loopback: interrupted, resumed, refused, damaged."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import data_samples as samples
import pytest

from oqc.config import Data
from oqc.data import download, load

CONTENT = bytes(range(256)) * 2000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `content`; `cuts` are the lengths after which the next answers break off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.cuts, self.ranges, self.asked = CONTENT, [], True, []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        if self.path == "/missing":
            return self.send_error(404)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.ranges else 0
        content = self.server.content
        if start and start >= len(content):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts else len(content)
        self.wfile.write(content[start : start + cut])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setattr(download, "TIMEOUT", 5.0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def part_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def test_whole_download(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    download.download(f"{server.url}/file", target, MD5)
    assert target.read_bytes() == CONTENT
    assert not part_of(target).exists()
    download.download(f"{server.url}/file", target, MD5)
    assert server.asked == [None], "what is there is not fetched again"


def test_broken_connections_are_taken_up_again(server: Server, tmp_path: Path) -> None:
    server.cuts = [100_000, 50_000, 1]
    download.download(f"{server.url}/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=100000-", "bytes=150000-", "bytes=150001-"]


def test_a_later_call_goes_on_from_the_part(server: Server, tmp_path: Path) -> None:
    server.cuts = [300, 0, 0, 0]
    with pytest.raises(ValueError, match="the connection closed early; 300 bytes are kept"):
        download.download(f"{server.url}/file", tmp_path / "file", MD5)
    assert not (tmp_path / "file").exists()
    assert part_of(tmp_path / "file").read_bytes() == CONTENT[:300]
    server.asked.clear()
    download.download(f"{server.url}/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == ["bytes=300-"]


def test_a_part_that_is_already_whole(server: Server, tmp_path: Path) -> None:
    part_of(tmp_path / "file").write_bytes(CONTENT)
    download.download(f"{server.url}/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    server.ranges, server.cuts = False, [200_000]
    download.download(f"{server.url}/file", tmp_path / "file", MD5)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server.asked == [None, "bytes=200000-"]


def test_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    wrong = "0" * 32
    with pytest.raises(ValueError, match=f"md5 is {MD5}, expected {wrong}"):
        download.download(f"{server.url}/file", tmp_path / "file", wrong)
    assert not (tmp_path / "file").exists()
    assert not part_of(tmp_path / "file").exists()


def test_clear_errors(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="HTTP 404"):
        download.download(f"{server.url}/missing", tmp_path / "a", MD5)
    with pytest.raises(ValueError, match=r"can't be fetched: .*refused"):
        download.download("http://127.0.0.1:9/file", tmp_path / "b", MD5)
    monkeypatch.setattr(download, "LIMIT", 1 << 16)
    with pytest.raises(ValueError, match="larger than 0 MiB"):
        download.download(f"{server.url}/file", tmp_path / "c", MD5)


def test_processes_started_together_download_once(server: Server, tmp_path: Path) -> None:
    args = (f"{server.url}/file", tmp_path / "file", MD5)
    threads = [threading.Thread(target=download.download, args=args) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.asked == [None]
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "tiny-imagenet"])
def test_load_downloads_what_is_not_there(
    name: str, server: Server, tmp_path: Path, official: Callable[..., None]
) -> None:
    sample, layout = samples.sample(name, "binary"), samples.layout_of(name, "binary")
    archive = samples.archived(sample.files, tmp_path / layout.archive, layout.folder)
    server.content, server.cuts = archive.read_bytes(), [1000]
    official(name, "binary", archive, server.url)
    assert samples.same(load(Data(name=name)), sample)
    requests = len(server.asked)
    assert samples.same(load(Data(name=name)), sample)
    assert len(server.asked) == requests == 2
