"""Packs are whole or absent, and say when they are damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oqc.config import Data
from oqc.data import load, pack, sources
from oqc.data.raw import moments, stratified


@pytest.fixture
def digits() -> Path:
    return sources.prepare("digits")


def test_manifest(digits: Path) -> None:
    manifest = json.loads((digits / "manifest.json").read_text())
    assert manifest["name"] == "digits"
    assert manifest["classes"] == [str(i) for i in range(10)]
    assert manifest["arrays"]["train_images"]["shape"] == [1438, 1, 8, 8]
    for key, entry in manifest["arrays"].items():
        assert entry["sha256"] == pack.checksum(digits / f"{key}.npy", "sha256")
    assert load(Data(name="digits")).digest == manifest["digest"]


def test_writing_into_a_loaded_set_never_reaches_the_pack(digits: Path) -> None:
    load(Data(name="digits")).train.images.fill_(1)
    pack.verify(digits)
    assert load(Data(name="digits")).train.images.max() == 255


@pytest.mark.parametrize("file", ["train_images.npy", "test_labels.npy"])
def test_truncated_array(file: str, digits: Path) -> None:
    with (digits / file).open("r+b") as out:
        out.truncate(1000)
    with pytest.raises(ValueError, match=rf"{file} is damaged: it has 1000 bytes, .* delete the folder {digits}"):
        load(Data(name="digits"))


def test_missing_array(digits: Path) -> None:
    (digits / "test_images.npy").unlink()
    with pytest.raises(ValueError, match=r"test_images\.npy is damaged: it has 0 bytes"):
        load(Data(name="digits"))


def test_flipped_bit_is_found_by_verify(digits: Path) -> None:
    assert pack.verify(digits)["name"] == "digits"
    file = digits / "train_images.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"train_images\.npy is damaged: its sha256"):
        pack.verify(digits)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 1}'])
def test_damaged_manifest(text: str, digits: Path) -> None:
    (digits / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        load(Data(name="digits"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("name",), 1),
        (("source",), None),
        (("image_size",), "8"),
        (("classes",), 10),
        (("classes", 0), 0),
        (("mean",), 0.5),
        (("mean",), []),
        (("std", 0), "x"),
        (("arrays",), []),
        (("arrays",), {}),
        (("arrays", "test_labels"), 359),
        (("arrays", "test_labels"), {}),
        (("arrays", "train_images", "shape"), []),
        (("arrays", "train_images", "shape", 0), None),
        (("arrays", "train_images", "bytes"), "x"),
        (("arrays", "train_images", "sha256"), None),
        (("digest",), 1),
    ],
)
def test_manifest_with_a_value_of_another_kind(path: tuple[str | int, ...], value: object, digits: Path) -> None:
    file = digits / "manifest.json"
    manifest = inner = json.loads(file.read_text())
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    file.write_text(json.dumps(manifest))
    for use in (pack.read_manifest, pack.verify, pack.load):
        with pytest.raises(ValueError, match=r"manifest\.json is damaged: it is no manifest of format 1"):
            use(digits)


@pytest.mark.parametrize(("old", "new"), [(b"}", b"\x80"), (b"|u1", b"|i1")])
def test_damaged_header(old: bytes, new: bytes, digits: Path) -> None:
    file = digits / "train_images.npy"
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    for use in (pack.verify, pack.load):
        with pytest.raises(ValueError, match=r"train_images\.npy is damaged: it(s header| holds int8)") as caught:
            use(digits)
        assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], bool]) -> None:
    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pack, "_sync", full)
    with pytest.raises(OSError, match="disk full"):
        sources.prepare("digits")
    assert untouched()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), r"\[Errno 28\] No space left on device: '{}-[0-9a-f]+'"),
        (OSError("9 requested and 0 written"), "{}-[0-9a-f]+: 9 requested and 0 written"),  # numpy's
    ],
)
def test_a_full_disk_is_told_with_the_pack(
    error: OSError, told: str, cache: Path, monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], bool]
) -> None:
    def full(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match=told.format(cache / "packs-v1" / "digits")):
        sources.prepare("digits")
    assert untouched()


def test_a_killed_write_leaves_no_pack(cache: Path) -> None:
    script = """
        import os, signal
        from oqc.data import pack, sources
        pack._digest = lambda manifest: os.kill(os.getpid(), signal.SIGKILL)  # all arrays are written by now
        sources.prepare("digits")
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert killed.returncode == -9
    (left,) = (cache / "packs-v1").iterdir()
    assert left.name.startswith(".tmp-")
    assert not list(pack.find())
    old = time.time() - 2 * pack.STALE
    os.utime(left, (old, old))
    load(Data(name="digits"))
    assert not left.exists(), "swept when the next pack is written"


def test_processes_that_pack_at_the_same_time(cache: Path) -> None:
    command = [sys.executable, "-c", "from oqc.data import sources; print(sources.prepare('digits'))"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert outputs == {str(folder) for folder in (cache / "packs-v1").iterdir()}
    pack.verify(next(pack.find("digits")))


def test_the_slower_writer_keeps_the_pack_that_is_there(digits: Path) -> None:
    before = (digits / "manifest.json").stat().st_mtime_ns
    source = sources._source("digits", None, None)
    pack.write(digits, source.read(), name="digits", origin="again", image_size=None)
    assert (digits / "manifest.json").stat().st_mtime_ns == before
    assert list(digits.parent.iterdir()) == [digits]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert pack.cache() == tmp_path / "cache"
    monkeypatch.delenv("OQC_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert pack.cache() == Path("/somewhere/oqc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert pack.cache() == Path.home() / ".cache" / "oqc"
    monkeypatch.setenv("OQC_DATA", "~nobody-here/x")
    with pytest.raises(ValueError, match="OQC_DATA must be a path, got '~nobody-here/x', but there is no home folder"):
        pack.cache()


def test_moments_are_exact_over_chunks() -> None:
    images = np.random.default_rng(0).integers(0, 256, (1500, 2, 3, 4), dtype=np.uint8)
    images[:, 1] = 7
    mean, std = moments(images)
    np.testing.assert_allclose(mean, (images / 255).mean((0, 2, 3)), atol=1e-12)
    assert std[0] == pytest.approx((images[:, 0] / 255).std(), abs=1e-12)
    assert std[1] == 1.0, "a constant channel is left as it is"


def test_stratified_depends_on_seed_and_role_only_in_choice() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 1000)
    kept, held = stratified(labels, 0.25, 0, "val")
    assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(1000))
    expected = np.round(0.25 * np.bincount(labels)).astype(int)
    for other in ((1, "val"), (0, "test")):
        _, other_held = stratified(labels, 0.25, *other)
        assert not np.array_equal(held, other_held)
        assert np.array_equal(np.bincount(labels[other_held]), expected)
