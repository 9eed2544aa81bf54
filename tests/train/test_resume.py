from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
from tiny_run import run_until, tiny_config, tiny_trainer, without_times
from torch import Tensor

from oqc.config import Run
from oqc.train import Silent, load_weights
from oqc.train.checkpoint import Damaged, names, read
from oqc.train.stopping import StopRequest

CONFIG = tiny_config({"mixup": 0.5, "cutout": 2}, ema=0.9, eval_every=2)  # 32 steps


def resume(folder: Path, config: Run = CONFIG, **options: object) -> tuple[object, dict[str, Tensor]]:
    trainer = tiny_trainer(config, folder, drop=0.2, val=16, resume=True, **options)
    summary = trainer.fit()
    return summary, trainer.step.state()


def test_stopped_at_twenty_random_steps_equals_the_uninterrupted_run_bitwise(tmp_path: Path) -> None:
    whole = tiny_trainer(CONFIG, tmp_path / "whole", drop=0.2, val=16)
    expected = whole.fit()
    tensors = {name: value.numpy().tobytes() for name, value in whole.step.state().items()}
    for step in random.Random(0).sample(range(1, 32), 20):
        folder = tmp_path / str(step)
        run_until(tiny_trainer(CONFIG, folder, drop=0.2, val=16), step, signal.SIGTERM)
        summary, state = resume(folder)
        assert {name: value.numpy().tobytes() for name, value in state.items()} == tensors, step
        assert without_times(summary) == without_times(expected), step
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert lines == summary.history
        assert names(folder / "checkpoints", "best") == names(tmp_path / "whole" / "checkpoints", "best")


def test_stopped_twice(tmp_path: Path) -> None:
    expected = tiny_trainer(CONFIG, drop=0.2, val=16).fit()
    run_until(tiny_trainer(CONFIG, tmp_path / "run", drop=0.2, val=16), 5, signal.SIGINT)
    run_until(tiny_trainer(CONFIG, tmp_path / "run", drop=0.2, val=16, resume=True), 19, signal.SIGINT)
    summary, _ = resume(tmp_path / "run")
    assert without_times(summary) == without_times(expected)
    assert len(json.loads((tmp_path / "run" / "environment.json").read_text())["resumed"]) == 2


def test_metrics_after_the_checkpoint_are_taken_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_until(tiny_trainer(CONFIG, folder, drop=0.2, val=16), 17, signal.SIGTERM)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 99}\n')
    summary, _ = resume(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == summary.history


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    killed = tiny_trainer(CONFIG, tmp_path / "run", drop=0.2, val=16).run(StopRequest())
    next(killed)
    killed.close()
    notes = Notes()
    summary, _ = resume(tmp_path / "run", progress=notes)
    assert notes.texts == ["no checkpoint yet (one is written after an evaluation, at most every 30 s): from the start"]
    assert without_times(summary) == without_times(tiny_trainer(CONFIG, drop=0.2, val=16).fit())


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    config = tiny_config(epochs=8)
    summary = tiny_trainer(config, tmp_path / "run", save_seconds=0).fit()
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    best = max(summary.history, key=lambda row: row["test_accuracy"])["step"]
    expected = [f"best-{best:09d}", "step-000000056", "step-000000064"]
    assert kept == sorted(f"{name}.{kind}" for name in expected for kind in ("json", "safetensors"))
    weights = load_weights(tmp_path / "run", "best")
    replay = tiny_trainer(config)
    for _ in replay.run(StopRequest()):
        if replay.done == best:
            break
    assert all((value == weights[name]).all() for name, value in replay.model.state_dict().items())


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing", "no json", "record"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path, kind: str) -> None:
    config = tiny_config(epochs=4)
    expected = tiny_trainer(config).fit()
    first = tiny_trainer(config, tmp_path / "run", save_seconds=0)
    run_until(first, 21, signal.SIGTERM)
    newest = tmp_path / "run" / "checkpoints" / "step-000000021.safetensors"
    data, record = newest.read_bytes(), newest.with_suffix(".json")
    if kind == "flipped":
        newest.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif kind == "truncated":
        newest.write_bytes(data[:-10])
    elif kind == "missing":
        newest.unlink()
    elif kind == "no json":
        record.write_text("{")
    else:
        record.write_text(record.read_text().replace('"step": 21', '"step": 22'))
    with pytest.raises(Damaged, match="step-000000021"):
        read(newest.parent, "step-000000021")

    notes = Notes()
    trainer = tiny_trainer(config, tmp_path / "run", resume=True, progress=notes)
    assert trainer.done == 16
    assert trainer.fit().parameter_hash == expected.parameter_hash
    assert any("step-000000021" in text for text in notes.texts)


def test_when_all_are_damaged_the_file_is_named(tmp_path: Path) -> None:
    run_until(tiny_trainer(folder=tmp_path / "run"), 5, signal.SIGTERM)
    (tmp_path / "run" / "checkpoints" / "step-000000005.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"step-000000005.safetensors is damaged"):
        tiny_trainer(folder=tmp_path / "run", resume=True)


def test_folders_are_not_overwritten_silently(tmp_path: Path) -> None:
    config, folder = tiny_config(epochs=1), tmp_path / "a run"
    run_until(tiny_trainer(config, folder), 3, signal.SIGTERM)
    with pytest.raises(ValueError, match=r"unfinished run; continue it with --resume '.*a run', or"):
        tiny_trainer(config, folder)
    tiny_trainer(config, folder, resume=True).fit()
    before = (folder / "summary.json").read_bytes()
    with pytest.raises(ValueError, match=r"run holds a finished run; choose another folder"):
        tiny_trainer(config, folder)
    with pytest.raises(ValueError, match="nothing to resume"):
        tiny_trainer(config, folder, resume=True)
    assert (folder / "summary.json").read_bytes() == before
    (folder / "mine.txt").write_text("kept")
    assert tiny_trainer(config, folder, overwrite=True).fit().steps == 8
    assert (folder / "mine.txt").read_text() == "kept"

    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        tiny_trainer(config, folder, overwrite=True)
    with pytest.raises(ValueError, match="not the folder of a run"):
        tiny_trainer(config, folder, resume=True)


def test_resuming_with_another_config_is_refused(tmp_path: Path) -> None:
    run_until(tiny_trainer(tiny_config(), tmp_path / "run"), 3, signal.SIGTERM)
    with pytest.raises(ValueError, match="another config"):
        tiny_trainer(tiny_config(lr=1.0), tmp_path / "run", resume=True)


def test_the_folder_tells_what_ran(tmp_path: Path) -> None:
    summary = tiny_trainer(tiny_config(), tmp_path / "run", tensorboard=True, notes={"backend": "torch"}).fit()
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["mode"] == "eager"
    assert environment["backend"] == "torch"
    assert environment["data"]["classes"] == ["a", "b", "c", "d"]
    assert {"torch", "oqc"} <= environment["versions"].keys()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"] == summary.best
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
