"""What stands in a run's folder survives a start that fails, other data, and a second process."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TinyNet, run_until, tiny_config, tiny_data, tiny_trainer

from oqc.train import RunFolder, Trainer
from oqc.train.environment import find_device
from oqc.train.numerics import numerics
from oqc.train.stopping import Stopped, StopRequest


class Odd(TinyNet):
    """Gives one class too many."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(super().forward(x), (0, 1))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_model_that_does_not_fit_is_told_before_anything_is_written(tmp_path: Path) -> None:
    tiny_trainer(folder=tmp_path / "run").fit()
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=r"output for one image is \[1, 5\], but tiny has 4 classes"):
        Trainer(Odd(), tiny_data(), tiny_config(), tmp_path / "run", device="cpu", overwrite=True).fit()
    assert contents(tmp_path / "run") == before
    with pytest.raises(ValueError, match="output for one image"):
        Trainer(Odd(), tiny_data(), tiny_config(), tmp_path / "new", device="cpu").fit()
    assert not (tmp_path / "new").exists()


def test_resume_refuses_other_data(tmp_path: Path) -> None:
    run_until(tiny_trainer(folder=tmp_path / "run"), 5, 15)
    other = dataclasses.replace(tiny_data(), digest="other")
    with pytest.raises(ValueError, match="was trained on other data: tiny has digest other now, it had tiny then"):
        Trainer(TinyNet(), other, tiny_config(), tmp_path / "run", device="cpu", resume=True)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    first = tiny_trainer(folder=tmp_path / "run")
    steps = first.run(StopRequest())
    next(steps)
    with pytest.raises(ValueError, match=r"another process is training in .*run"):
        tiny_trainer(folder=tmp_path / "run", overwrite=True).fit()
    assert json.loads((tmp_path / "run" / "config.json").read_text())
    for _ in steps:
        pass
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_config_changed_by_hand_is_not_resumed(tmp_path: Path) -> None:
    run_until(tiny_trainer(folder=tmp_path / "run"), 5, 15)
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"lr": 0.01', '"lr": 0.5'))
    with pytest.raises(ValueError, match=r"config.json has train.lr 0.5, but the run was trained with 0.01 so far"):
        tiny_trainer(tiny_config(lr=0.5), tmp_path / "run", resume=True)
    path.write_text(path.read_text().replace('"lr": 0.5', '"lr": 0.01').replace('"name": "tiny"', '"name": "moved"'))
    moved = tiny_config({"name": "moved"})  # its digest is what counts
    assert tiny_trainer(moved, tmp_path / "run", resume=True).done == 5


class Killed(BaseException):
    """Nothing is cleaned up after it but what a context manager would."""


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("after", range(9))
def test_a_kill_while_a_run_begins_leaves_a_folder_to_begin_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, overwrite: bool
) -> None:
    """Killed before any of the changes that starting a run makes to its folder, with and without a run in it."""
    if overwrite:
        tiny_trainer(folder=tmp_path / "run").fit()
        (tmp_path / "run" / "export").mkdir()
    left = after

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return function(*args, **options)

        return call

    trainer = tiny_trainer(folder=tmp_path / "run", overwrite=overwrite)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", counted(Path.unlink))
        patch.setattr("os.replace", counted(os.replace))
        patch.setattr(Path, "rmdir", counted(Path.rmdir))
        with pytest.raises(Killed):
            trainer.fit()
    folder = RunFolder(tmp_path / "run")
    if (folder.path / "config.json").exists():  # there is a run: whole, or to be gone on with
        assert folder.finished == (folder.checkpoints.exists() and (folder.path / "summary.json").exists())
        if not folder.finished:
            assert tiny_trainer(folder=folder.path, resume=True).done in (0, 32)
    assert tiny_trainer(folder=folder.path, overwrite=(folder.path / "config.json").exists()).fit().steps == 32


@pytest.mark.parametrize("resume", [False, True])
def test_a_signal_before_the_first_step_leaves_the_folder_as_it_was(tmp_path: Path, resume: bool) -> None:
    """As while a model compiles."""
    run_until(tiny_trainer(folder=tmp_path / "run"), 5, 15)
    before = contents(tmp_path / "run")
    trainer = tiny_trainer(folder=tmp_path / "run", resume=resume, overwrite=not resume)
    trainer.prepare = lambda: signal.raise_signal(signal.SIGINT)  # type: ignore[method-assign]
    with pytest.raises(Stopped, match="stopped by SIGINT after step") as end:
        trainer.fit()
    assert contents(tmp_path / "run") == before
    assert end.value.folders == ([tmp_path / "run"] if resume else [])


@pytest.mark.parametrize("closed", ["run", "run/checkpoints"])
def test_a_folder_that_cannot_be_written_is_told_before_anything_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    run_until(tiny_trainer(folder=tmp_path / "run"), 5, 15)
    before, allowed = contents(tmp_path / "run"), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / closed and allowed(path, mode))
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match=f"{closed}, a run's place, must be a folder that can be written"):
            tiny_trainer(folder=tmp_path / "run", **options).fit()
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("linked", [False, True])
def test_a_run_that_is_replaced_leaves_no_checkpoint_and_every_file_of_others(tmp_path: Path, linked: bool) -> None:
    folder = RunFolder(tmp_path / "run")
    if linked:  # as to a larger disk
        (tmp_path / "disk").mkdir()
        folder.path.mkdir()
        tiny_trainer(folder=tmp_path / "run").fit()
        shutil.rmtree(folder.checkpoints)
        folder.checkpoints.symlink_to(tmp_path / "disk")
        tiny_trainer(folder=folder.path, overwrite=True).fit()
    else:
        tiny_trainer(folder=folder.path).fit()
    mine = ("notes.txt", "step-000000032.safetensors.bak", "best.json")
    for name in mine:
        (folder.checkpoints / name).write_text("mine")
    assert tiny_trainer(tiny_config(epochs=1), folder.path, overwrite=True).fit().steps == 8
    kept = {path.stem for path in folder.checkpoints.iterdir() if path.name not in mine}
    assert kept == {"step-000000008", "best-000000008"}
    assert all((folder.checkpoints / name).read_text() == "mine" for name in mine)


def test_files_of_others_are_not_taken_for_a_beginning(tmp_path: Path) -> None:
    for name in ("thesis.tmp", "environment.json", "config.json.tmp"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(ValueError, match="is not empty and holds no run; choose another folder"):
            tiny_trainer(folder=folder, overwrite=True)
        assert (folder / name).read_text() == "mine"


def test_a_failed_write_names_the_file_and_lets_go_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = tiny_trainer(folder=tmp_path / "run", save_seconds=0)
    steps = trainer.run(StopRequest())
    next(steps)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*step-0+8.safetensors|best-0+8.safetensors"):
        for _ in steps:
            pass
    monkeypatch.undo()
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert tiny_trainer(folder=tmp_path / "run", resume=True).fit().steps == 32


def test_a_run_that_another_process_ended_meanwhile_is_left_alone(tmp_path: Path) -> None:
    run_until(tiny_trainer(folder=tmp_path / "run"), 5, 15)
    for finish in (False, True):
        late = tiny_trainer(folder=tmp_path / "run", resume=True)
        if finish:
            tiny_trainer(folder=tmp_path / "run", resume=True).fit()
        else:
            run_until(tiny_trainer(folder=tmp_path / "run", resume=True), 20, 15)
        before = contents(tmp_path / "run")
        with pytest.raises(ValueError, match=r"another process has gone on with .*run meanwhile"):
            late.fit()
        assert contents(tmp_path / "run") == before


def test_the_best_of_a_step_that_was_never_saved_goes(tmp_path: Path) -> None:
    run_until(tiny_trainer(folder=tmp_path / "run"), 9, 15)
    checkpoints = tmp_path / "run" / "checkpoints"
    for suffix in ("json", "safetensors"):
        shutil.copy(checkpoints / f"best-000000008.{suffix}", checkpoints / f"best-000000016.{suffix}")
    run_until(tiny_trainer(folder=tmp_path / "run", resume=True), 10, 15)
    assert [path.name for path in checkpoints.glob("best-*.json")] == ["best-000000008.json"]


def test_the_best_goes_by_the_evaluation_that_the_run_has_of_its_step(tmp_path: Path) -> None:
    """Before the kill step 16 was the best so far; the run that goes on evaluates it again, below step 8."""
    run_until(tiny_trainer(folder=tmp_path / "run"), 9, 15)
    checkpoints = tmp_path / "run" / "checkpoints"
    for suffix in ("json", "safetensors"):
        shutil.copy(checkpoints / f"best-000000008.{suffix}", checkpoints / f"best-000000016.{suffix}")
    resumed = tiny_trainer(folder=tmp_path / "run", resume=True)
    resumed.history[0]["test_accuracy"] = 100.0
    run_until(resumed, 17, 15)
    assert [path.name for path in checkpoints.glob("best-*.json")] == ["best-000000008.json"]


def test_a_best_from_beyond_a_damaged_checkpoint_goes_when_there_is_another(tmp_path: Path) -> None:
    """Until then it is the only one: those before it went when it was written."""
    run_until(tiny_trainer(folder=tmp_path / "run"), 9, 15)
    checkpoints = tmp_path / "run" / "checkpoints"
    for path in checkpoints.glob("best-000000008.*"):
        path.rename(path.with_stem("best-000000032"))
    resumed = tiny_trainer(folder=tmp_path / "run", resume=True)
    resumed.history[0]["test_accuracy"] = 0.0  # the next one is better
    run_until(resumed, 12, 15)
    assert [path.name for path in checkpoints.glob("best-*.json")] == ["best-000000032.json"]
    resumed = tiny_trainer(folder=tmp_path / "run", resume=True)
    run_until(resumed, 17, 15)
    assert [path.name for path in checkpoints.glob("best-*.json")] == ["best-000000016.json"]


@pytest.mark.parametrize("name", ["meta", "xpu", "cuda:99", "gpu"])
def test_devices_that_are_not_there_are_named(name: str) -> None:
    with pytest.raises(ValueError, match="device"):
        find_device(name)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_numerics_are_as_before_afterwards(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with numerics(tf32=False, deterministic=True):
            pass
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_file_of_a_run_that_cannot_be_read_is_named_in_plain_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    run_until(tiny_trainer(folder=tmp_path / "run"), 5, 15)
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(ValueError, match=r"run/config\.json cannot be read: Permission denied$"):
        RunFolder(tmp_path / "run").config()
