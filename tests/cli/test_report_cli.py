"""`oqc report` as a user meets it."""

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from oqc import config
from oqc.cli import report as cli
from oqc.experiments.presets import PRESETS
from oqc.train import RunFolder

DEMO = Path(__file__).parents[2] / "results" / "demo" / "runs.jsonl"


def report(*args):
    command = [sys.executable, "-m", "oqc", "report", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


def suite_record(preset, seed):
    return {
        "preset": preset,
        "seed": seed,
        "best": 64.0 + seed,
        "final": 63.0,
        "parameters": 6_370_000,
        "images_per_s": 60_000.0,
        "per_epoch": [{"epoch": 1, "test": 64.0}],
        "mechanism": {},
        "config": config.to_dict(PRESETS[preset]()),
        "environment": {"gpu": "NVIDIA H200"},
    }


def test_the_demos_file(tmp_path):
    shutil.copy(DEMO, tmp_path)
    done = report(tmp_path, "--out", tmp_path / "a" / "b")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "a" / "b" / name) for name in ("results.md", "figures/accuracy.svg")]
    text = (tmp_path / "a" / "b" / "results.md").read_text()
    assert text.startswith("# Results: digits\n")
    best = [record["best"] for record in map(json.loads, DEMO.open()) if record["preset"] == "OQC-dynamic"]
    assert len(best) == 3
    assert f"| OQC-dynamic | {statistics.fmean(best):.2f} ± {statistics.stdev(best):.2f} |" in text
    assert (tmp_path / "a" / "b" / "figures" / "accuracy.svg").read_text().startswith("<svg")


def test_one_run_of_a_suite_goes_beside_its_file(tmp_path):
    (tmp_path / "runs.jsonl").write_text(json.dumps(suite_record("cifar100_afbo", 0)) + "\n")
    done = report(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "| AFBO+PR | 6.37 M (6.37 M) | 64.25 ± 0.22 | 64.00 | 63.00 | 1 |" in (tmp_path / "results.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.md", "runs.jsonl"]


def record_with(**changes):
    return json.dumps(suite_record("cifar100_afbo", 0) | changes) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no results file at"),
        ("", "runs.jsonl has no records"),
        ("nonsense\n", "runs.jsonl, line 1: not a JSON object"),
        (record_with() + record_with(best=None), "runs.jsonl, line 2: best cannot be None"),
        (record_with(best=float("nan")), "line 1: best cannot be nan"),
        (record_with(mechanism={"before": "x"}), "line 1: before of mechanism cannot be 'x'"),
        (record_with(per_epoch=[1]), "line 1: per_epoch cannot have 1"),
        (record_with(config={"data": None}), "line 1: data of config cannot be None"),
        (record_with() + record_with(), "runs.jsonl, line 2: cifar100_afbo, seed 0 is in line 1 already"),
    ],
)
def test_mistakes_are_one_line(tmp_path, text, message):
    if text is not None:
        (tmp_path / "runs.jsonl").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        cli.report(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "results.md").exists()


def test_runs_of_train_are_told_from_records(tmp_path):
    run, seeds = tmp_path / "a run", tmp_path / "seeds"
    for folder in (run, seeds / "s1", seeds / "s0"):
        RunFolder(folder).write("config.json", config.to_dict(config.Run()))
    with pytest.raises(
        ValueError, match=r"a run is a run of oqc train and has no runs\.jsonl; .*: oqc analyze '.*a run'$"
    ):
        cli.report(run)
    with pytest.raises(ValueError, match=r"seeds holds runs of oqc train \(s0, s1\) .*: oqc analyze .*/seeds/s0$"):
        cli.report(seeds)
    (run / "config.json").write_text('{"architectures": ["ViTModel"]}')
    with pytest.raises(ValueError, match="no results file at"):
        cli.report(run)


def test_places_that_are_no_folders(tmp_path):
    done = report(tmp_path / "none")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"got {tmp_path / 'none'}, which does not exist" in done.stderr
    shutil.copy(DEMO, tmp_path)
    with pytest.raises(ValueError, match=r"FOLDER must be a folder .* which is a file"):
        cli.report(tmp_path / "runs.jsonl")
    with pytest.raises(ValueError, match=r"--out must be a folder .*runs\.jsonl is a file"):
        cli.report(tmp_path, out=tmp_path / "runs.jsonl")
    with pytest.raises(ValueError, match=r"--out must be a folder .*runs\.jsonl is a file"):
        cli.report(tmp_path, out=tmp_path / "runs.jsonl" / "below")


def test_what_others_wrote_stays(tmp_path):
    shutil.copy(DEMO, tmp_path)
    figures = tmp_path / "out" / "figures"
    figures.mkdir(parents=True)
    (figures / "pareto.svg").write_text("mine")
    (tmp_path / "out" / "results.md").write_text("![](figures/pareto.svg)")
    with pytest.raises(ValueError, match=r"out/results\.md is not of `oqc report`; name another folder"):
        cli.report(tmp_path, out=tmp_path / "out")
    (tmp_path / "out" / "results.md").unlink()
    cli.report(tmp_path, out=tmp_path / "out")
    cli.report(tmp_path, out=tmp_path / "out")  # over its own
    assert sorted(path.name for path in figures.iterdir()) == ["accuracy.svg", "pareto.svg"]
    (tmp_path / "runs.jsonl").write_text(json.dumps(suite_record("cifar100_afbo", 0)) + "\n")
    cli.report(tmp_path, out=tmp_path / "out")
    assert [path.name for path in figures.iterdir()] == ["pareto.svg"]  # its own, no longer shown, is gone


def test_rows_stand_in_the_order_of_the_presets(tmp_path):
    lines = [suite_record(name, 0) for name in ("cifar100_vit_tiny", "cifar100_lowrank_r56", "cifar100_afbo")]
    for line in lines:
        line["config"]["data"]["name"] = "digits"
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cli.report(tmp_path)
    found = re.findall(r"^\| (cifar100_\w+)", (tmp_path / "results.md").read_text(), re.MULTILINE)
    assert found == ["cifar100_afbo", "cifar100_lowrank_r56", "cifar100_vit_tiny"]
