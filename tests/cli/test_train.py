"""What `oqc train`, `evaluate` and `predict` say of the places and files they are given."""

import zlib

import pytest
import torch
from typer.testing import CliRunner

from oqc.cli import app
from oqc.cli.train import _read_image
from oqc.config import Model


def png(*chunks):
    """The file with these chunks, each a name and its content."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, content in chunks:
        parts += [len(content).to_bytes(4), name + content, zlib.crc32(name + content).to_bytes(4)]
    return b"".join(parts)


def header(side):
    return b"IHDR", side.to_bytes(4) * 2 + bytes([8, 2, 0, 0, 0])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no image", "cannot identify image file"),
        (png(header(20_000), (b"IDAT", b"")), "400000000 pixels"),
        (png(header(8), (b"zTXt", b"text\0\0" + zlib.compress(bytes(2 << 20)))), "Decompressed data too large"),
    ],
    ids=["no image", "too large", "too much text"],
)
def test_an_image_that_cannot_be_read_is_named(content, why, tmp_path):
    path = tmp_path / "one.png"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"one.png cannot be read as an image: .*{why}"):
        _read_image(path, Model())


def test_a_device_that_is_not_there_is_told_before_the_processes_join(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):  # as torchrun does
        monkeypatch.setenv(name, value)
    ended = CliRunner().invoke(app, ["train", "--data", "digits", "--device", "cuda", "--out", str(tmp_path / "run")])
    assert isinstance(ended.exception, ValueError)
    assert str(ended.exception) == "device is cuda, but PyTorch sees 0 CUDA devices here"
