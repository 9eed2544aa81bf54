"""`oqc data list | prepare | verify`."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import data_samples as samples
import pytest
from typer.testing import CliRunner

from oqc.cli.data import app


def run(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    if result.exception:
        raise result.exception
    return result.output


def test_prepare_list_verify() -> None:
    before = {row["name"]: row["pack"] for row in json.loads(run("list", "--json"))}
    assert before == {"digits": None, "cifar10": None, "cifar100": None, "tiny-imagenet": None}
    assert "digits: 1438 train and 359 test images of 1x8x8, 10 classes" in run("prepare", "digits")
    after = {row["name"]: row for row in json.loads(run("list", "--json"))}
    assert Path(after["digits"]["pack"]).is_dir()
    assert after["digits"]["image"] == [1, 8, 8]
    assert "cifar100: not packed" in run("list")
    assert run("verify", "digits").startswith("intact: digits")


def test_paths_and_sizes(tmp_path: Path) -> None:
    root = samples.image_tree(tmp_path / "my images", ("train", "test"))
    assert "my-images: 10 train and 10 test images of 3x4x4" in run("prepare", str(root), "--image-size", "4")
    assert str(root) in run("verify", str(root))
    assert run("verify", "my-images").count("intact") == 1


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pack of 'cifar10'; make one with: oqc data prepare cifar10"):
        run("verify", "cifar10")
    with pytest.raises(ValueError, match="did you mean 'digits'"):
        run("prepare", "digit")
    with pytest.raises(ValueError, match="image_size must be at least 1, got 0"):
        run("prepare", "digits", "--image-size", "0")
    run("prepare", "digits")
    pack = next(row["pack"] for row in json.loads(run("list", "--json")) if row["name"] == "digits")
    with (Path(pack) / "test_images.npy").open("ab") as out:
        out.write(b"x")
    with pytest.raises(ValueError, match=r"test_images\.npy is damaged"):
        run("verify", "digits")


@pytest.mark.parametrize("kind", ["digits", "own", "official"])
def test_a_pack_that_is_cut_short_is_told_with_what_mends_it(
    kind: str, tmp_path: Path, official: Callable[..., None]
) -> None:
    given = [kind]
    if kind == "own":
        given = [str(samples.image_tree(tmp_path / "my images", ("train", "test"))), "--image-size", "4"]
    elif kind == "official":
        official("cifar100", "binary")
        files = samples.sample("cifar100", "binary").files
        given = ["cifar100", "--root", str(samples.extracted(files, tmp_path / "my files"))]
    run("prepare", *given)
    (pack,) = (Path(row["pack"]) for row in json.loads(run("list", "--json")) if row["pack"])
    with (pack / "test_images.npy").open("r+b") as out:
        out.truncate(100)
    mend = f"rm -r {shlex.quote(str(pack))} && oqc data prepare {shlex.join(given)}"
    told = f"{pack}/test_images.npy is damaged: it has 100 bytes, the manifest says "
    (row,) = (row for row in json.loads(run("list", "--json")) if row["pack"])
    assert row["damaged"].startswith(told)
    assert row["damaged"].endswith(f": {mend}")
    for name in ("prepare", "verify"):
        with pytest.raises(ValueError, match="is damaged") as caught:
            run(name, *(given if name == "prepare" else given[:1]))
        assert str(caught.value) == row["damaged"]
    shutil.rmtree(pack)
    run("prepare", *given)
    assert str(pack) in run("verify", given[0])
