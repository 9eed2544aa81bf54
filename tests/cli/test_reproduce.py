"""`oqc reproduce` as a user meets it: a whole suite, in time; stopped, killed and taken up again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oqc.config import to_dict
from oqc.experiments.suites import SUITES, plan
from oqc.report import append_record, read_records
from oqc.train import RunFolder

TIMES = ("images_per_s", "seconds", "setup_seconds", "wall_seconds", "environment")
DIGITS = ("--data", "digits", "--epochs", "2", "--seeds", "1")


def start(*args, cwd, **options):
    command = [sys.executable, "-m", "oqc", "reproduce", *args]
    return subprocess.Popen(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def run(*args, cwd):
    process = start(*args, cwd=cwd)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def content(folder, presets=None):
    """What must repeat of the records, by preset and seed."""
    return {
        (r["preset"], r["seed"]): {name: value for name, value in r.items() if name not in TIMES}
        for r in read_records(folder / "runs.jsonl")
        if presets is None or r["preset"] in presets
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All suites on digits, left alone."""
    cwd = tmp_path_factory.mktemp("whole")
    began = time.monotonic()
    code, out, err = run("all", *DIGITS, cwd=cwd)
    return cwd, code, out, err, time.monotonic() - began


@pytest.mark.slow
def test_all_suites_on_digits_in_under_five_minutes(whole):
    cwd, code, out, err, seconds = whole
    assert (code, err) == (0, "")
    assert seconds < 300
    found = content(cwd / "results" / "digits")
    assert set(found) == {(name, 0) for name in SUITES["all"]}
    total = len(SUITES["all"])
    assert f"all on digits: {total} runs, 0 done" in out
    assert f"[{total}/{total}]" in out
    assert "left" in out
    assert all(name in out for name in SUITES["all"])
    assert "\x1b" not in out  # plain lines when not a terminal


@pytest.mark.slow
def test_what_is_there_is_not_run_again(whole):
    cwd = whole[0]
    before = (cwd / "results" / "digits" / "runs.jsonl").read_bytes()
    code, out, err = run("rank-sweep", *DIGITS, "--json", cwd=cwd)
    assert code == 0
    found = json.loads(out)
    assert [row["preset"] for row in found["rows"]] == list(SUITES["rank-sweep"])
    assert (found["left"], found["diverged"]) == ([], [])
    assert "rank-sweep on digits: 11 runs, 11 done" in err
    assert "all in results/digits/runs.jsonl; the table: oqc report results/digits" in err
    assert (cwd / "results" / "digits" / "runs.jsonl").read_bytes() == before


@pytest.mark.slow
def test_killed_five_times_it_ends_with_the_same_records(whole, tmp_path):
    chance, path, mark = random.Random(0), tmp_path / "runs.jsonl", f"killed-{tmp_path}"
    args = ("rank-sweep", *DIGITS, "--results", str(tmp_path))
    sizes = []
    for records in (0, 1, 1, 2, 1):  # so many more are waited for before the kill
        before = size(path)
        process = start(*args, cwd=tmp_path, env=os.environ | {"OQC_TEST_MARK": mark})
        while size(path) < before + records and process.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 1 if records else 2.5))
        process.kill()
        process.communicate()
        sizes.append(size(path))
    assert 5 <= sizes[-1] < len(SUITES["rank-sweep"])
    assert wait_for_no_process(mark)
    code, _, err = run(*args, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert len(read_records(path)) == len(SUITES["rank-sweep"])
    assert content(tmp_path) == content(whole[0] / "results" / "digits", SUITES["rank-sweep"])


def size(path):
    return len(read_records(path)) if path.exists() else 0


def wait_for_no_process(mark):
    """Whether all processes that have the mark in their environment are gone within a while."""
    for _ in range(100):
        if not any(mark.encode() in environ(path) for path in Path("/proc").glob("[0-9]*/environ")):
            return True
        time.sleep(0.1)
    return False


def environ(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("number", "whole_group", "seconds"),
    [(signal.SIGTERM, True, 5), (signal.SIGINT, True, 5), (signal.SIGINT, True, 0.7), (signal.SIGTERM, False, 5)],
)
def test_a_signal_ends_it_cleanly(number, whole_group, seconds, tmp_path):
    """Some seconds into the first runs, and while their processes still import PyTorch."""
    mark = f"stopped-{tmp_path}"
    process = start(
        "table1", "--data", "digits", "--epochs", "500", "--seeds", "1", "--results", ".", cwd=tmp_path,
        env=os.environ | {"OQC_TEST_MARK": mark}, start_new_session=True,
    )  # fmt: skip
    line = process.stdout.readline()
    assert line == "table1 on digits: 5 runs, 0 done  models shrunk for a CPU\n"
    time.sleep(seconds)
    if whole_group:  # as a terminal or a scheduler does
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert f"stopped by {signal.Signals(number).name}; 5 of 5 runs are left; the same command goes on" in err
    assert wait_for_no_process(mark)
    assert not (tmp_path / "runs.jsonl").exists()


def test_runs_of_another_machine_or_version_are_told(tmp_path):
    for one in plan("vit-tiny", 1, "digits", 2):
        about = {"preset": one.preset, "seed": 0, "config": to_dict(one.run), "per_epoch": [], "mechanism": {}}
        about |= {"best": 20.0, "final": 20.0, "parameters": 9, "images_per_s": 1.0}
        where = {"gpu": "NVIDIA H200", "device": "cuda", "commit": "ea2d3d7c7e2d1d7b0f3a"}
        append_record(tmp_path / "runs.jsonl", about | {"environment": where})
    code, _, err = run("vit-tiny", *DIGITS, "--results", ".", cwd=tmp_path)
    assert code == 0
    told = "2 of 2 runs stood in runs.jsonl before, made on NVIDIA H200, commit ea2d3d7."
    assert err == f"{told} For runs of your own alone: --results FOLDER\n"


def test_runs_that_diverged_are_told_and_left_out(tmp_path):
    jobs = plan("vit-tiny", 1, "digits", 2)
    for one in jobs:
        about = {"preset": one.preset, "seed": 0, "per_epoch": [], "environment": {}}
        where = {"diverged": {"epoch": 2, "step": 5}}
        append_record(tmp_path / "a b" / "runs.jsonl", about | where | {"config": to_dict(one.run)})
    code, out, err = run("vit-tiny", *DIGITS, "--results", "a b", cwd=tmp_path)
    assert code == 0
    assert "vit-tiny on digits: 2 runs, 2 done" in out
    assert "all in a b/runs.jsonl; the table: oqc report 'a b'\n" in out  # as a shell takes it
    named = "cifar100_vit_tiny (seed 0, in epoch 2), cifar100_vit_tiny_pr (seed 0, in epoch 2)"
    assert err == (
        f"2 of 2 runs diverged and are in no mean and no claim: {named}. To run one again, take its line out of"
        " a b/runs.jsonl\n"
    )
    code, out, _ = run("vit-tiny", *DIGITS, "--results", "a b", "--json", cwd=tmp_path)
    found = json.loads(out)
    assert (found["rows"], found["left"]) == ([], [])
    assert found["diverged"][0] == {"preset": "cifar100_vit_tiny", "seed": 0, "epoch": 2, "step": 5}


def test_out_of_time(tmp_path):
    code, out, err = run("table1", *DIGITS, "--minutes", "0", "--results", "here", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "5 of 5 runs are left; the same command goes on from here/runs.jsonl" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tabel1",), "did you mean 'table1'?"),
        (("table1", "--data-dir", "nowhere"), "--data-dir must be the folder or archive of cifar100, got nowhere"),
        (("table1", *DIGITS, "--results", "broken"), "broken/runs.jsonl, line 1: not a JSON object"),
        (("table1", *DIGITS, "--results", "held"), "another process is training in held"),
        (("table1", *DIGITS, "--results", "broken/runs.jsonl"), "broken/runs.jsonl is a file"),
        (
            ("table1", *DIGITS, "--results", "/proc/none"),
            "--results must be a folder that can be written, but /proc cannot be",
        ),
        (("table1", *DIGITS, "--data-dir", "held"), "--data-dir is for cifar100, the digits come with scikit-learn"),
        (("table1", *DIGITS, "--device", "tpu"), "device must be cpu, cuda or cuda:<number>, got 'tpu'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(args, message, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "runs.jsonl").write_text("{\n")
    with RunFolder(tmp_path / "held").held():
        code, _, err = run(*args, cwd=tmp_path)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
