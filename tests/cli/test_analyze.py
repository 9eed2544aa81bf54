"""`oqc analyze` on a run of `oqc train`."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from oqc.analysis import METRICS
from oqc.data import load
from oqc.experiments.job import Job
from oqc.experiments.protocol import DIGITS_DATA
from oqc.experiments.running import train_jobs
from oqc.experiments.suites import run_of
from oqc.models import create_model
from oqc.train import Trainer
from oqc.train.stopping import StopRequest


def analyze(*args, cwd):
    return subprocess.run([sys.executable, "-m", "oqc", "analyze", *args], capture_output=True, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of one epoch, and its config."""
    cwd = tmp_path_factory.mktemp("analyze")
    run = run_of("cifar100_dynamic_r83", 0, "digits", 1)
    Trainer(create_model(run.model, seed=0), load(DIGITS_DATA), run, cwd / "run", device="cpu").fit()
    return cwd, run


def test_json_has_what_the_suite_records_of_the_same_run(trained):
    cwd, run = trained
    result = analyze("run", "--json", "--device", "cpu", cwd=cwd)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["run"], found["checkpoint"], found["images"]) == ("run", "last", len(load(DIGITS_DATA).test))
    assert set(found["mechanism"]) == set(METRICS)
    [(_, record)] = train_jobs([Job("dynamic", run)], torch.device("cpu"), StopRequest())
    assert found["mechanism"] == record["mechanism"]


def test_the_table_says_what_each_number_is(trained):
    result = analyze("run", "--checkpoint", "best", "--device", "cpu", cwd=trained[0])
    assert result.returncode == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert set(METRICS) <= set(lines)
    assert "mean |cos(q_perp, m)|" in lines["after"]
    assert "set beside the paper's" in lines["separation_centroids"]
    assert "best weights" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere",), "nowhere is not the folder of a run: it has no config.json"),
        (
            ("the records",),
            "the records holds records and no weights; their metrics stand in its runs.jsonl: oqc report 'the records'",
        ),
        (("run", "--checkpoint", "first"), "checkpoint must be one of last, best, got 'first'"),
        (("run", "--data-dir", "nowhere"), "--data-dir nowhere does not exist"),
        (("list",), "list/config.json: Run must be a table of fields, got []"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(args, message, trained):
    (trained[0] / "the records").mkdir(exist_ok=True)
    (trained[0] / "the records" / "runs.jsonl").touch()
    (trained[0] / "list").mkdir(exist_ok=True)
    (trained[0] / "list" / "config.json").write_text("[]")
    result = analyze(*args, cwd=trained[0])
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_other_data_than_the_run_was_trained_on_is_refused(trained, tmp_path):
    shutil.copytree(trained[0] / "run", tmp_path / "run")
    path = tmp_path / "run" / "environment.json"
    path.write_text(path.read_text().replace(load(DIGITS_DATA).digest, "0" * 64))
    result = analyze("run", "--device", "cpu", cwd=tmp_path)
    assert result.returncode == 2
    assert "run was trained on other data" in result.stderr
