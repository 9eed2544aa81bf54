from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import tiny_data
from typer.testing import CliRunner, Result

from oqc.cli import app
from oqc.config import Run
from oqc.data import load
from oqc.models import create_model
from oqc.train import RunFolder, Stopped, Trainer, load_weights
from oqc.train.stopping import StopRequest

SMALL = ["model.width=8", "model.depth=2", "model.heads=2", "model.patch_size=2", "model.ffn.rank=2", "data.crop=1"]


@pytest.fixture
def npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OQC_DATA", str(tmp_path / "cache"))
    data = tiny_data()
    path = tmp_path / "tiny.npz"
    parts = {"train": data.train, "test": data.test}
    arrays = {f"x_{name}": part.images[:, 0].numpy() for name, part in parts.items()}
    arrays |= {f"y_{name}": part.labels.numpy() for name, part in parts.items()}
    np.savez(path, classes=np.array(["ant", "bee", "cat", "dog"]), **arrays)
    return path


def options(npz: Path, *more: str) -> list[str]:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    return ["--data", str(npz), "--batch", "8", "--precision", "fp32", "--device", "cpu", *settings, *more]


def oqc(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_train_evaluate_predict(npz: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = oqc("train", *options(npz, "--epochs", "3", "--val", "0.25", "--out", str(run), "--complement", "lowrank"))
    assert ended.exit_code == 0, ended.output
    assert re.search(r"epoch 3  loss \d.*train \d.*val \d.*test \d.*images/s", ended.output)
    summary = json.loads((run / "summary.json").read_text())
    assert f"final {summary['final']:.2f}" in ended.output
    config = RunFolder(run).config()
    assert (config.model.num_classes, config.model.image_size, config.model.channels) == (4, 4, 1)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["attention"] == "first of EFFICIENT_ATTENTION, FLASH_ATTENTION, MATH that can"
    assert environment["backend"] == "torch"

    found = json.loads(oqc("evaluate", str(run), "--json", "--device", "cpu").output)
    assert found["accuracy"] == summary["final"]
    assert found["images"] == 30
    val = json.loads(oqc("evaluate", str(run), "--split", "val", "--checkpoint", "best", "--json").output)
    assert val["accuracy"] == max(row["val_accuracy"] for row in summary["history"])

    pixels = load(config.data).test.images[:3]
    names = []
    for number, image in enumerate(pixels):
        names.append(str(tmp_path / f"{number}.png"))
        Image.fromarray(image[0].numpy()).save(names[-1])
    npz.unlink()  # the run folder is enough to predict
    rows = [json.loads(line) for line in oqc("predict", str(run), *names, "--json").output.splitlines()]
    assert [row["image"] for row in rows] == names
    assert {one["class"] for one in rows[0]["top"]} == {"ant", "bee", "cat", "dog"}
    assert sum(one["probability"] for one in rows[0]["top"]) == pytest.approx(1)
    assert "bee" in oqc("predict", str(run), names[0]).output


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(npz: Path, tmp_path: Path) -> None:
    run, image = tmp_path / "run", tmp_path / "one.png"
    assert oqc("train", *options(npz, "--epochs", "3", "--out", str(run))).exit_code == 0
    Image.fromarray(load(RunFolder(run).config().data).test.images[0, 0].numpy()).save(image)
    newest, before = (run / "checkpoints" / f"step-{step:09d}.safetensors" for step in (24, 16))
    for suffix in (".json", ".safetensors"):  # as where saving is more frequent than in so short a run
        shutil.copy(newest.with_suffix(suffix), before.with_suffix(suffix))
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    fault = f"checkpoint {newest} is damaged: its digest is not the one in {newest.stem}.json"
    told = f"{fault}; going back to {before.stem}\n"
    commands = {
        "evaluate": ["--json"], "analyze": ["--json"], "predict": [str(image)], "export": ["--to", "safetensors"]
    }  # fmt: skip
    for name, more in commands.items():
        ended = oqc(name, str(run), *more)
        assert (ended.exit_code, ended.stderr) == (0, told), name
        if more == ["--json"]:
            assert json.loads(ended.stdout)["step"] == 16
    assert "(last weights, step 16)" in oqc("evaluate", str(run)).stdout
    with pytest.warns(UserWarning, match=re.escape(told.strip())):
        load_weights(run)
    before.write_bytes(b"")
    ended = oqc("evaluate", str(run))
    assert re.match(rf"checkpoint {newest} is damaged", str(ended.exception))


def test_a_run_folder_changed_by_hand_is_refused_in_one_line(npz: Path, tmp_path: Path) -> None:
    """Whether the weights would still fit, as into another kind of gate, or not."""
    run = tmp_path / "run"
    train = options(npz, "--epochs", "1", "--out", str(run), "--complement", "lowrank")
    assert oqc("train", *train).exit_code == 0
    path = run / "config.json"
    config = path.read_text()
    commands = (["evaluate"], ["analyze"], ["predict", str(npz)], ["export", "--to", "safetensors"])
    for field, then, now in (("complement", '"lowrank"', '"shared"'), ("width", "8", "16")):
        path.write_text(config.replace(f'"{field}": {then}', f'"{field}": {now}'))
        message = (
            f"{path} has .*{field} {now.strip(chr(34))}, but the run was trained with {then.strip(chr(34))} so far"
        )
        for name, *more in commands:
            assert re.match(message, str(oqc(name, str(run), *more).exception)), name
    path.write_text(config)
    for environment in ("[]", '{"data": []}', '{"data": {"mean": 0.5}}'):
        (run / "environment.json").write_text(environment)
        for name, *more in commands:
            ended = oqc(name, str(run), *more)
            assert re.search(r"environment\.json does not tell the data of the run: .*classes", str(ended.exception)), (
                name
            )


def test_seeds_have_their_own_folders(npz: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    ended = oqc("train", *options(npz, "--epochs", "1", "--out", str(out), "--seeds", "0,3", "--at-once", "2"))
    assert ended.exit_code == 0, ended.output
    hashes = {name: json.loads((out / name / "summary.json").read_text())["parameter_hash"] for name in ("s0", "s3")}
    assert len(set(hashes.values())) == 2


def test_dry_run_prints_the_resolved_config_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = oqc(
        "train", "--data", "tiny-imagenet", "--host", "mlp", "--lr", "1e-3", "--set", "train.ema=0.9", "--dry-run"
    )
    config = json.loads(ended.output)
    assert config["model"]["num_classes"] == 200
    assert config["model"]["image_size"] == 64
    assert (config["train"]["lr"], config["train"]["ema"], config["model"]["ffn"]["host"]) == (1e-3, 0.9, "mlp")
    assert list(tmp_path.iterdir()) == []
    several = oqc("train", "--data", "digits", "--seeds", "7,8", "--dry-run")
    assert [one["train"]["seed"] for one in json.loads(several.stdout)] == [7, 8]
    assert json.loads(oqc("train", "--data", "digits", "--seeds", "7", "--dry-run").stdout)["train"]["seed"] == 7
    chosen = oqc("train", "--model", "deep_vit_afbo_lowrank_r56", "--set", "model.num_classes=7", "--dry-run")
    assert json.loads(chosen.output)["model"]["num_classes"] == 7
    assert json.loads(chosen.output)["model"]["ffn"]["complement"] == "lowrank"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--host", "mpl"], "host must be one of .*did you mean 'mlp'"),
        (["train", "--set", "train.lrr=1"], "unknown field 'train.lrr'.*did you mean 'train.lr'"),
        (["train", "--seeds", "0,x"], "--seeds must be whole numbers"),
        (["train", "--seeds", "1,1"], "--seeds must differ"),
        (["train", "--resume", "nowhere"], "nowhere is not the folder of a run"),
        (["train", "--resume", "nowhere", "--lr", "1"], "--resume continues a run with its own config"),
        (["train", "--data", "nowhere"], "data name must be one of"),
        (["evaluate", "nowhere"], "nowhere is not the folder of a run"),
        (["evaluate", "nowhere", "--split", "train"], "split must be one of test, val"),
    ],
)
def test_mistakes_are_one_clear_line(arguments: list[str], message: str) -> None:
    ended = oqc(*arguments)
    assert isinstance(ended.exception, ValueError)
    assert re.match(message, str(ended.exception))
    assert "\n" not in str(ended.exception)


def test_what_is_no_image_is_named_after_the_classes_of_what_is(npz: Path, tmp_path: Path) -> None:
    run, image, text = (tmp_path / name for name in ("run", "one.png", "x.png"))
    oqc("train", *options(npz, "--epochs", "1", "--out", str(run)))
    Image.new("L", (4, 4)).save(image)
    text.write_text("no image")
    given = [str(path) for path in (image, text, image, tmp_path / "none.png")]
    ended = oqc("predict", str(run), *given)
    assert [line for line in ended.stdout.splitlines() if not line.startswith("  ")] == [given[0], given[2]]
    assert re.fullmatch(
        r"\S*x\.png cannot be read as an image: .*; \S*none\.png cannot be read.*", str(ended.exception)
    )
    ended = oqc("predict", str(run), *given, "--json")
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(row["image"], "top" in row, "error" in row) for row in rows] == [
        (path, path == str(image), path != str(image)) for path in given
    ]
    assert isinstance(ended.exception, ValueError)
    assert isinstance(oqc("predict", str(run), str(text)).exception, ValueError)


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on_from_there(npz: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "oqc", "train", *options(npz, "--epochs", "100000", "--out", str(run))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert f"oqc train --resume {run}" in errors

    config = RunFolder(run).config()
    resumed, whole = _trainer(config, run), _trainer(config, None)
    assert resumed.done > 0
    end = resumed.done + 20
    for trainer in (resumed, whole):
        _train_to(trainer, end)
    for name, value in resumed.step.state().items():
        assert torch.equal(value, whole.step.state()[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("seeds", ["0", "0,1"])
def test_a_signal_to_one_rank_stops_both_in_order(npz: Path, tmp_path: Path, seeds: str) -> None:
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "oqc", "train", *options(npz, "--epochs", "100000", "--out", str(run))]
    ranks = [
        subprocess.Popen(
            [*command, "--seeds", seeds],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        while not any(path.stat().st_size for path in tmp_path.glob("run/**/metrics.jsonl")):
            assert ranks[0].poll() is None, ranks[0].communicate()[1]
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGTERM)
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [143, 143], errors
    assert re.search("stopped by SIGTERM after step .*oqc train --resume", errors[0])
    assert ("1 more run is left: give the same command with --seeds 1" in errors[0]) is (seeds == "0,1")


@pytest.mark.slow
def test_torchrun_trains_as_one_process_does(npz: Path, tmp_path: Path) -> None:
    shared = options(npz, "--epochs", "2", "--set", "train.precision=fp64")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two = [*launch, "-m", "oqc", "train", *shared, "--out", str(tmp_path / "two")]
    ended = subprocess.run(two, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("epoch 2  ") == 1  # rank 0 alone reports
    assert oqc("train", *shared, "--out", str(tmp_path / "one")).exit_code == 0
    one, other = load_weights(tmp_path / "one"), load_weights(tmp_path / "two")
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-9)
    assert json.loads((tmp_path / "two" / "environment.json").read_text())["processes"] == 2


def _trainer(config: Run, folder: Path | None) -> Trainer:
    model = create_model(config.model, seed=0, backend=config.train.backend)
    return Trainer(model, load(config.data), config, folder, resume=folder is not None, device="cpu")


def _train_to(trainer: Trainer, end: int) -> None:
    stop = StopRequest()
    try:
        for _ in trainer.run(stop):
            if trainer.done == end:
                stop.signal = signal.SIGTERM
    except Stopped:
        pass
    assert trainer.done == end


def test_every_seed_that_diverges_is_named_and_every_one_that_ends_told(npz: Path, tmp_path: Path) -> None:
    wild = options(npz, "--epochs", "2", "--lr", "1e30", "--set", "train.clip=0", "--set", "train.nan_limit=2")
    ended = oqc("train", *wild, "--seeds", "0,1", "--out", str(tmp_path / "a b"))
    assert ended.exit_code == 1
    assert ended.stderr.count(" steps in a row had a non-finite loss or gradient (train.nan_limit 2); ") == 2
    for seed in (0, 1):
        assert f"the last finite state is in {tmp_path / 'a b' / f's{seed}'}" in ended.stderr


def test_a_device_or_mode_that_is_not_there_is_told_before_the_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oqc.cli.train.load", lambda data: pytest.fail("the data was read"))
    for extra, message in (
        (("--device", "foo"), "device must be cpu, cuda"),
        (("--device", "cpu", "--mode", "graph"), "mode graph needs a CUDA device"),
        (("--at-once", "0"), "--at-once must be auto or a number from 1 on"),
    ):
        ended = oqc("train", "--data", "digits", "--out", str(tmp_path / "run"), *extra)
        assert isinstance(ended.exception, ValueError)
        assert message in str(ended.exception)


def test_a_preset_on_other_data_is_augmented_as_that_is() -> None:
    run = json.loads(oqc("train", "--preset", "cifar100_afbo", "--data", "digits", "--dry-run").stdout)
    assert (run["data"]["crop"], run["data"]["flip"]) == (0, False)
    run = json.loads(oqc("train", "--preset", "cifar100_afbo", "--dry-run").stdout)
    assert (run["data"]["crop"], run["data"]["flip"]) == (4, True)


def test_a_run_on_a_file_is_evaluated_from_any_folder(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(npz.parent)
    ended = oqc("train", *options(Path(npz.name), "--epochs", "1", "--out", str(tmp_path / "run")))
    assert ended.exit_code == 0, ended.output
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "% of 30 test images" in oqc("evaluate", str(tmp_path / "run")).stdout


def test_predict_takes_as_many_channels_as_the_run_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OQC_DATA", str(tmp_path / "cache"))
    images = np.random.default_rng(0).integers(0, 256, (16, 4, 4, 4), dtype=np.uint8)
    labels = np.arange(16) % 2
    np.savez(tmp_path / "four.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    run = tmp_path / "run"
    assert oqc("train", *options(tmp_path / "four.npz", "--epochs", "1", "--out", str(run))).exit_code == 0
    Image.fromarray(images[0]).save(tmp_path / "one.png")
    assert oqc("predict", str(run), str(tmp_path / "one.png")).stdout.count("%") == 2


def test_a_stop_tells_of_this_commands_runs_alone(npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of those that it would have replaced later."""
    out = ("--seeds", "0,1,2", "--out", str(tmp_path / "runs"))
    assert oqc("train", *options(npz, "--epochs", "1"), *out).exit_code == 0
    stop_in_seed_1(monkeypatch)
    ended = oqc("train", *options(npz, "--epochs", "2"), *out, "--overwrite")
    assert ended.exit_code == 128 + signal.SIGTERM
    assert [f"s{seed}: best" in ended.stdout for seed in range(3)] == [True, False, False]
    assert "1 more run is left" in ended.stderr


@pytest.mark.parametrize("together", [True, False])
def test_what_a_stop_of_several_seeds_says_brings_them_to_their_end(
    npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """Those that were under way, named or as the folder of all, and those that were not started."""
    runs = tmp_path / "runs"
    command = ["train", *options(npz, "--epochs", "2", "--out", str(runs), "--seeds")]
    with monkeypatch.context() as patch:
        stop_in_seed_1(patch)
        ended = oqc(*command, "0,1,2")
    way = f"continue with: oqc train --resume {runs / 's1'}; 1 more run is left: give the same command with"
    assert f"{way} --seeds 2\n" in ended.stderr
    ended = oqc("train", "--resume", str(runs if together else runs / "s1"))
    assert ended.exit_code == 0, ended.output
    assert [f"s{seed}: best" in ended.stdout for seed in range(3)] == [False, True, False]
    assert oqc(*command, "2").exit_code == 0
    assert sorted(path.name for path in runs.iterdir()) == ["s0", "s1", "s2"]
    assert all(RunFolder(runs / name).finished for name in ("s0", "s1", "s2"))
    assert str(oqc("train", "--resume", str(runs)).exception) == (
        f"--resume {runs}: its 3 runs are finished; there is nothing to resume"
    )


def stop_in_seed_1(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer._look

    def signalled(self: Trainer, stop: StopRequest) -> None:
        if self.config.train.seed == 1 and self.done == 2:
            signal.raise_signal(signal.SIGTERM)
        step(self, stop)

    monkeypatch.setattr(Trainer, "_look", signalled)
