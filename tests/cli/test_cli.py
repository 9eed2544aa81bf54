"""The command line as a user meets it, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import oqc
import oqc_start
from oqc.cli.demo import _free_folder
from oqc.train import RunFolder

ROOT = Path(__file__).parents[2]


def run(*args, cwd=None):
    return subprocess.run([sys.executable, "-m", "oqc", *args], capture_output=True, text=True, cwd=cwd)


def test_ctrl_c_before_pytorch_is_there_ends_it_quietly(tmp_path):
    """The command as pip installs it, with a PyTorch whose import takes a minute."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    module, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["oqc"].split(":")
    command = [sys.executable, "-c", f"import sys; from {module} import {name}; sys.exit({name}())", "models"]
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": paths}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=10), process.returncode) == (("", ""), 130)


def test_ctrl_c_is_as_before_once_the_command_runs(monkeypatch):
    before, seen = signal.getsignal(signal.SIGINT), []
    monkeypatch.setattr("oqc.cli.main", lambda: seen.append(signal.getsignal(signal.SIGINT)))
    oqc_start.main()
    assert seen == [before]
    assert signal.getsignal(signal.SIGINT) == before


def test_version():
    assert run("--version").stdout.strip() == f"oqc {oqc.__version__}"


def test_help_groups_the_commands():
    text = run("--help").stdout
    for word in ("Start here", "Train and use", "Data", "demo", "models", "train", "evaluate", "predict", "data"):
        assert word in text


@pytest.mark.parametrize("command", ["prepare", "verify"])
def test_help_calls_a_data_set_name(command):
    found = run("data", command, "--help").stdout
    assert f"oqc data {command} [OPTIONS] {{NAME}}" in found


def test_models_json_has_the_published_counts():
    found = {row["name"]: row for row in json.loads(run("models", "--json").stdout)}
    counts = [6.37, 6.97, 7.19, 7.59, 7.59, 6.43, 7.03, 7.25, 7.65, 7.65]
    paper = [row for row in found.values() if row["paper"]]
    assert sorted(round(row["parameters"] / 1e6, 2) for row in paper) == sorted(counts)
    row = found["deep_vit_afbo_lowrank_r56_64px"]
    assert (row["image_size"], row["num_classes"], row["parameters"]) == (64, 200, 7254097)
    assert all(isinstance(row["parameters"], int) for row in found.values())


def test_models_as_a_table():
    text = run("models", "deep_vit_afbo_*_r56").stdout
    assert "deep_vit_afbo_lowrank_r56" in text
    assert "7.19 M" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("models", "deep_vit_afbo_lowrnk_r56"), "did you mean 'deep_vit_afbo_lowrank_r56'"),
        (("train", "--data", "digits", "--host", "mpl", "--dry-run"), "host must be one of"),
        (("train", "--data", "digits", "--seeds", "0,,1", "--dry-run"), "--seeds must be whole numbers"),
        (("train", "--data", "digits", "--seeds", "0,-1", "--dry-run"), "--seeds must be 0 or more, got '0,-1'"),
        (("train", "--data", "digits", "--set", "train.seed=-1", "--dry-run"), "train.seed must be 0 or more, got -1"),
        (("train", "--data", "digits", "--root", "/tmp", "--epochs", "1"), "root is not for digits"),
        (("data", "prepare", "digits", "--root", "/tmp"), "root is not for digits, which come with scikit-learn"),
        (
            ("data", "prepare", "~nobody-here/x"),
            "data name must be a path, got '~nobody-here/x', but there is no home folder ~nobody-here",
        ),
        (("data", "verify", "~nobody-here/x"), "data name must be a path, got '~nobody-here/x'"),
        (("data", "prepare", "cifar10", "--root", "~nobody-here"), "root must be a path, got '~nobody-here'"),
        (("train", "--data", "~nobody-here/x", "--dry-run"), "data name must be a path, got '~nobody-here/x'"),
        (("train", "--data", "cifar10", "--root", "~nobody-here", "--dry-run"), "root must be a path, got"),
        (("demo", "--out", "/dev/null/x"), "--out must be a folder that can be written, but /dev/null is a file"),
        (("train", "--data", "digits", "--out", "/dev/null/x"), "must be a folder that can be written, but /dev/null"),
        (("train", "--data", "digits", "--complement", "ful", "--dry-run"), "did you mean 'full'"),
        (("train", "--data", "digits", "--model", "deep_vit_afo", "--dry-run"), "did you mean 'deep_vit_afbo'"),
        (("train", "--data", "digits", "--set", "model.heads=7", "--dry-run"), "heads must divide width, got heads 7"),
        (
            ("train", "--data", "digits", "--set", "model.patch_size=3", "--dry-run"),
            "image_size must be a multiple of patch_size",
        ),
        (
            ("train", "--data", "digits", "--set", "model.image_size=16", "--dry-run"),
            "model.image_size must be 8, as the images of digits are, got 16; --set data.image_size=16 resizes them",
        ),
        (
            ("train", "--data", "digits", "--complement", "lowrank", "--rank", "0", "--dry-run"),
            "rank must be at least 1, got 0",
        ),
        (
            ("train", "--data", "digits", "--complement", "lowrank", "--rank", "5000", "--dry-run"),
            "rank must be from 1 to the hidden width",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_2(args, message, tmp_path):
    result = run(*args, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_demo_end_to_end(tmp_path):
    result = run("demo", "--seeds", "1", "--epochs", "1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for word in ("AFBO+PR", "OQC full", "OQC-LR", "OQC-static", "OQC-dynamic", "Overlap after", "[5/5]"):
        assert word in result.stdout
    assert "\x1b" not in result.stdout  # plain lines when not a terminal
    page = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert "<svg" in page
    assert "OQC-dynamic" in page
    assert run("demo", "--out", "runs/demo", cwd=tmp_path).returncode == 2


def test_demos_that_start_at_once_share_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [str(_free_folder(None)) for _ in range(3)] == ["runs/demo", "runs/demo-2", "runs/demo-3"]
    with RunFolder(tmp_path / "mine").held():
        result = run("demo", "--out", "mine", "--seeds", "1", "--epochs", "1", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (2, "error: another process is training in mine\n")
    assert _free_folder(Path("mine")) == Path("mine")  # nothing came of the one that was there
    (tmp_path / "mine" / "runs.jsonl").touch()
    with pytest.raises(ValueError, match="--out mine exists and is not an empty folder"):
        _free_folder(Path("mine"))


def test_a_demo_that_is_stopped_says_so(tmp_path):
    command = [sys.executable, "-m", "oqc", "demo", "--seeds", "1", "--epochs", "500", "--out", "here"]
    process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert "5 models x 1 seed" in process.stdout.readline()
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "stopped by SIGINT; no run had ended\n")
