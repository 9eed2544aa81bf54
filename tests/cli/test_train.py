"""What `oqc train`, `evaluate` and `predict` say of the places and files they are given."""

import json
import re
import shutil
import signal
import statistics
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from oqc.cli import app
from oqc.cli.predict import read_image
from oqc.config import Model
from oqc.data import cifar, sources
from oqc.train import RunFolder, Trainer

SMALL = [f"--set=model.{field}" for field in ("width=16", "depth=2", "heads=2")]
DIGITS = ["--data", "digits", "--device", "cpu", "--precision", "fp32", "--batch", "400", *SMALL]


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
        read_image(path, Model())


def test_a_device_that_is_not_there_is_told_before_the_processes_join(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):  # as torchrun does
        monkeypatch.setenv(name, value)
    ended = CliRunner().invoke(app, ["train", "--data", "digits", "--device", "cuda", "--out", str(tmp_path / "run")])
    assert isinstance(ended.exception, ValueError)
    assert str(ended.exception) == "device is cuda, but PyTorch sees 0 CUDA devices here"


def oqc(*args):
    ended = CliRunner().invoke(app, [str(arg) for arg in args])
    if isinstance(ended.exception, ValueError):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def write_data(old, seed=0):
    """Images in a file or a folder, after its name."""
    images, labels = np.random.default_rng(seed).integers(0, 256, (20, 4, 4, 3), np.uint8), np.arange(20) % 2
    if old.suffix == ".npz":
        np.savez(old, x_train=images, y_train=labels, x_test=images, y_test=labels)
    else:
        for place, (image, label) in enumerate(zip(images, labels, strict=True)):
            (old / f"class {label}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(old / f"class {label}" / f"{place}.png")


TINY = [f"--set=model.{field}" for field in ("width=8", "depth=2", "heads=2", "patch_size=2")]
TINY += ["--batch", "4", "--precision", "fp32", "--device", "cpu"]


@pytest.fixture(params=["d.npz", "d"])
def moved(request, tmp_path, monkeypatch):
    """A run on a file or a folder of images, which lies in `new` now."""
    monkeypatch.setenv("OQC_DATA", str(tmp_path / "cache"))
    old = tmp_path / request.param
    write_data(old)
    oqc("train", "--data", old, *TINY, "--epochs", "1", "--out", tmp_path / "run")
    (tmp_path / "new").mkdir()
    return tmp_path, shutil.move(old, tmp_path / "new" / request.param)


def test_data_that_moved_is_given_by_its_place_or_the_folder_it_is_in(moved, monkeypatch):
    folder, now = moved
    monkeypatch.chdir(folder)
    for command in ("evaluate", "analyze"):
        with pytest.raises(ValueError, match=r"d(\.npz)? does not exist; if it was moved, give --data-dir with its"):
            oqc(command, "run", "--device", "cpu")
        for place in ("new", f"new/{now.name}", now):
            assert json.loads(oqc(command, "run", "--data-dir", place, "--device", "cpu", "--json"))["images"] > 0
        with pytest.raises(ValueError, match="--data-dir nowhere does not exist"):
            oqc(command, "run", "--data-dir", "nowhere", "--device", "cpu")
        with pytest.raises(ValueError, match=r"must be d\.npz or the folder it is in, got run|run: class .* is empty"):
            oqc(command, "run", "--data-dir", "run", "--device", "cpu")


def stopped(monkeypatch, *args):
    """Trains two steps, in which a signal comes."""
    look, begun = Trainer._look, []

    def signalled(self, stop):
        begun.append(self)
        if len(begun) == 2:
            signal.raise_signal(signal.SIGTERM)
        look(self, stop)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_look", signalled)
        ended = CliRunner().invoke(app, [str(arg) for arg in args])
    assert ended.exit_code == 128 + signal.SIGTERM, ended.output


def content(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["d.npz", "d"])
def test_a_run_whose_data_moved_goes_on_from_where_they_lie_now(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OQC_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    data, other = tmp_path / name, tmp_path / f"other {name}"
    write_data(data)
    write_data(other, seed=1)
    stopped(monkeypatch, "train", "--data", name, *TINY, "--epochs", "3", "--out", "run")
    oqc("train", "--data", name, *TINY, "--epochs", "3", "--out", "whole")
    (tmp_path / "new").mkdir()
    data.rename(tmp_path / "new" / f"2{name}")
    before = content(tmp_path / "run")
    for given, why in (
        ((), f"data {re.escape(str(data))} does not exist; if it was moved, give --data-dir"),
        (("--data-dir", "nowhere"), "--data-dir nowhere does not exist"),
        (("--data-dir", other.name), "run was trained on other data: other-d has digest"),
        (("--root", "new"), "--resume continues a run with its own config; .*moved, give --data-dir"),
    ):
        with pytest.raises(ValueError, match=why):
            oqc("train", "--resume", "run", "--device", "cpu", *given)
        assert content(tmp_path / "run") == before
    stopped(monkeypatch, "train", "--resume", "run", "--device", "cpu", "--data-dir", f"new/2{name}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    oqc("train", "--resume", tmp_path / "run", "--device", "cpu")  # it is known from now on
    hashes = [json.loads((tmp_path / run / "summary.json").read_text())["parameter_hash"] for run in ("run", "whole")]
    assert hashes[0] == hashes[1]
    with pytest.raises(ValueError, match="run holds a finished run; there is nothing to resume"):
        oqc("train", "--resume", tmp_path / "run", "--device", "cpu", "--data-dir", tmp_path / "new" / f"2{name}")


def test_the_data_of_several_seeds_move_for_all_or_none(tmp_path, monkeypatch):
    monkeypatch.setenv("OQC_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "d")
    write_data(tmp_path / "other", seed=1)
    for seed, data in (("0", "d"), ("1", "d"), ("2", "other")):
        stopped(monkeypatch, "train", "--data", data, *TINY, "--epochs", "2", "--seeds", seed, "--out", f"runs/s{seed}")
    (tmp_path / "d").rename("d2")
    before = content(tmp_path / "runs")
    with pytest.raises(ValueError, match="s2 was trained on other data"):
        oqc("train", "--resume", "runs", "--device", "cpu", "--data-dir", "d2")
    assert content(tmp_path / "runs") == before
    shutil.rmtree(tmp_path / "runs" / "s2")
    stopped(monkeypatch, "train", "--resume", "runs", "--device", "cpu", "--data-dir", "d2")  # in the first of them
    oqc("train", "--resume", "runs", "--device", "cpu")
    assert all(RunFolder(tmp_path / "runs" / seed).finished for seed in ("s0", "s1"))


def test_a_known_set_whose_root_moved_is_found_when_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("OQC_DATA", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    layout = sources.OFFICIAL["cifar100"].layouts[0]
    few = replace(layout, read=partial(cifar.read_binary, replace(cifar.CIFAR100, train=100, test=100)))
    monkeypatch.setitem(sources.OFFICIAL, "cifar100", sources.Official("", (few,)))
    folder = tmp_path / "old" / layout.folder
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        images = (bytes([0, label]) + bytes(3 * 32 * 32) for label in range(100))
        (folder / f"{part}.bin").write_bytes(b"".join(images))
    (folder / "fine_label_names.txt").write_text("".join(f"class {number}\n" for number in range(100)))
    data = ("--data", "cifar100", "--root", "old", "--set", "model.patch_size=16")
    stopped(monkeypatch, "train", *TINY, *data, "--epochs", "2", "--out", "run")
    (tmp_path / "old").rename("new")
    with pytest.raises(ValueError, match=r"data .*old does not exist; if it was moved, give --data-dir"):
        oqc("train", "--resume", "run", "--device", "cpu")
    stopped(monkeypatch, "train", "--resume", "run", "--device", "cpu", "--data-dir", "new")
    assert RunFolder("run").config().data.root == str(tmp_path / "new")
    oqc("train", "--resume", "run", "--device", "cpu")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--data", "./ck.pt"), r"data ck\.pt is neither an image folder nor an \.npz file$"),
        (("--data", "./nowhere"), "data nowhere does not exist$"),
        (("--data", "digits", "--data-dir", "d"), "--data-dir d is for --resume; a new run takes --data .* and --root"),
    ],
)
def test_a_new_run_is_not_told_of_data_that_moved(given, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ck.pt").touch()
    with pytest.raises(ValueError, match=why):
        oqc("train", *given, "--device", "cpu")


@pytest.mark.parametrize("name", ["crop", "cutout"])
def test_augmentation_that_leaves_little_of_an_image_is_refused(name):
    oqc("train", "--data", "digits", "--set", f"data.{name}=8", "--dry-run")
    with pytest.raises(ValueError, match=rf"data\.{name} must be at most the side of the images, 8, got 9"):
        oqc("train", "--data", "digits", "--set", f"data.{name}=9", "--dry-run")


def test_what_has_no_effect_or_no_meaning_is_refused():
    with pytest.raises(ValueError, match="--rank 8 is that of a complement, and this model has none"):
        oqc("train", "--data", "digits", "--model", "deep_vit_afbo", "--rank", "8", "--dry-run")
    with pytest.raises(ValueError, match="--preset cifar100_afbo and --model deep_vit_mlp both name a model"):
        oqc("train", "--data", "digits", "--preset", "cifar100_afbo", "--model", "deep_vit_mlp", "--dry-run")
    with pytest.raises(ValueError, match=r"--seeds 0,1 and --set train\.seed=7 both name seeds: give one of them"):
        oqc("train", "--data", "digits", "--seeds", "0,1", "--set", "train.seed=7", "--dry-run")
    told = json.loads(oqc("train", "--data", "digits", "--complement", "lowrank", "--rank", "8", "--dry-run"))
    assert told["model"]["ffn"]["rank"] == 8


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ((), "digits-afbo"),
        (("--model", "deep_vit_mlp"), "deep_vit_mlp"),
        (("--model", "deep_vit_afbo", "--complement", "full"), "digits-afbo-full-r56"),
        (("--preset", "cifar100_lowrank_r56", "--epochs", "2"), "cifar100_lowrank_r56"),
        (("--preset", "cifar100_lowrank_r56", "--complement", "none"), "digits-afbo"),
    ],
)
def test_a_run_is_named_after_a_preset_or_a_model_while_it_is_one(options, name, tmp_path, monkeypatch):
    places = []

    def check(folder, **_):
        places.append(folder.path)
        raise ValueError("that is as far as it has to go")

    monkeypatch.setattr(RunFolder, "check", check)
    with pytest.raises(ValueError, match="as far as"):
        oqc("train", "--data", "digits", *options)
    assert re.fullmatch(rf"{name}-[0-9a-f]{{12}}-s0", places[0].name)


def test_the_folder_of_several_runs_names_them(tmp_path):
    for name in ("s0", "s1"):
        (tmp_path / "both" / name).mkdir(parents=True)
        (tmp_path / "both" / name / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"both is not the folder of a run: .*; runs in it: .*both/s0, .*both/s1$"):
        oqc("evaluate", tmp_path / "both")


def test_several_seeds_end_with_their_mean(tmp_path):
    lines = oqc("train", *DIGITS, "--epochs", "1", "--seeds", "0,1", "--out", tmp_path / "both").splitlines()
    about = "digits: 1,438 training and 359 test images of 10 classes, 1 x 8 x 8"
    assert (lines[0], lines.count(about)) == (about, 1)
    best = [json.loads((tmp_path / "both" / name / "summary.json").read_text())["best"] for name in ("s0", "s1")]
    spread = f"{statistics.fmean(best):.2f} ± {statistics.stdev(best):.2f}"
    assert lines[-1].startswith(f"2 runs, mean ± std: best {spread}, final ")


def test_a_warmup_that_is_asked_for_and_cut_short_is_told(tmp_path):
    told = oqc("train", *DIGITS, "--epochs", "3", "--set=train.warmup=3", "--seeds=0,1", "--out", tmp_path / "both")
    assert told.count("train.warmup 3 is more than half of the epochs: it takes 1.5\n") == 1
    for number, more in enumerate((["3"], ["2", "--set=train.warmup=1"])):
        assert "train.warmup" not in oqc("train", *DIGITS, "--epochs", *more, "--out", tmp_path / str(number))


def test_the_held_out_part_is_told_with_the_others(tmp_path):
    told = oqc("train", *DIGITS, "--epochs", "1", "--val", "0.1", "--out", tmp_path / "run").splitlines()[0]
    assert told == "digits: 1,295 training, 143 validation and 359 test images of 10 classes, 1 x 8 x 8"
