import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from oqc.cli import app
from oqc.config import FFN, Model
from oqc.experiments import bench
from oqc.nn import OQCFFN
from oqc.report.figures import throughput

SMALL = ("--batch", "2", "--set", "depth=2", "--set", "width=32", "--set", "heads=2", "--repeats", "5")
FIELDS = {
    "host", "complement", "rank", "backend", "mode", "phase", "images_per_s", "p20", "p80", "gpu_busy_ms",
    "peak_memory_bytes", "compile_s", "floor_share",
}  # fmt: skip


def run(*args, cwd=None):
    command = [sys.executable, "-m", "oqc", "bench", "--device", "cpu", *SMALL, *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_json_rows(tmp_path):
    result = run("--complements", "none,lowrank", "--backends", "torch,reference",
                 "--precision", "fp32", "--out", "bench.json", "--json", cwd=tmp_path)  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert len(rows) == 8
    assert all(set(row) >= FIELDS for row in rows)
    assert all(0 < row["p20"] <= row["images_per_s"] <= row["p80"] for row in rows)
    assert {row["rank"] for row in rows} == {None, 56}
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert saved["rows"] == rows
    assert "versions" in saved["environment"]
    assert "<svg" in (tmp_path / "bench.svg").read_text()


def test_rows_say_which_backend_ran(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = run("--complements", "none", "--backends", "triton,torch", "--phases", "inference", "--json", cwd=tmp_path)
    assert [row["backend"] for row in json.loads(found.stdout)] == ["torch"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--hosts", "afbo,mpl"), "hosts must be one of"),
        (("--modes", "fast"), "modes must be one of eager, compiled, graph, got 'fast'"),
        (("--modes", "eager,graph"), "modes: graph needs a CUDA device, got device cpu; use eager or compiled"),
        (("--case", "afbo:none:torch:graph:train"), "modes: graph needs a CUDA device"),
        (("--precision", "fp64"), "precision must be one of fp32, bf16"),
        (("--set", "num_classes=0"), "num_classes must be more than 0 and finite, got 0"),
        (("--out", "file/b.json"), "file is a file"),
        (
            ("--out", "/proc/b.json"),
            "error: --out /proc/b.json: its place must be a folder that can be written, but /proc cannot be",
        ),
        (
            ("--out", "file.svg"),
            "--out file.svg: the figure beside it, file.svg, would have this name; name a .json file",
        ),
        (("--out", "b.json"), "--out b.json: the figure beside it, b.svg, exists; name a new file"),
        (("--out", "folder"), "--out folder exists; name a new file"),
    ],
)
def test_mistakes_are_named(args, message, tmp_path):
    for name in ("file", "b.svg"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "folder").mkdir()
    result = run(*args, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(("grad", "fault"), [(True, "y is off"), (False, "y in inference is off")])
def test_a_backend_that_strays_is_refused(monkeypatch, grad, fault):
    model = Model(image_size=8, patch_size=2, width=16, heads=2, ffn=FFN(complement="lowrank", rank=4))
    bench.check_parity(model, "torch", torch.device("cpu"), "fp32")
    original = OQCFFN.forward

    def strays(module, *args, **options):
        wrong = module.backend == "torch" and torch.is_grad_enabled() == grad
        return original(module, *args, **options) * (1.001 if wrong else 1)

    monkeypatch.setattr(OQCFFN, "forward", strays)
    with pytest.raises(ValueError, match=f"backend torch fails parity for afbo with lowrank in fp32: {fault}"):
        bench.check_parity(model, "torch", torch.device("cpu"), "fp32")


def test_a_rank_that_is_named_is_timed_also_where_it_is_the_default(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "run_bench", lambda todo, **options: seen.extend(todo) or [])
    command = ["bench", "--device", "cpu", "--complements", "none,static", "--json"]
    for more, ranks in (([], {83}), (["--set", "ffn.rank=56"], {56}), (["--set", "ffn.rank=57"], {57})):
        seen.clear()
        assert CliRunner().invoke(app, [*command, *more]).exit_code == 0
        assert {case.row()["rank"] for case in seen} == {None, *ranks}
    for field, option in (("ffn.host=mlp", "--hosts"), ("ffn.complement=full", "--complements")):
        found = CliRunner().invoke(app, [*command, "--set", field])
        assert str(found.exception) == f"--set {field.partition('=')[0]}: name it with {option}"


def test_the_paper_s_models_pass_in_bf16():
    for case in bench.cases(["afbo"], ["full", "lowrank", "static", "dynamic"], ["torch"], ["eager"], ["train"]):
        bench.check_parity(case.model, "torch", torch.device("cpu"), "bf16")


def test_figure_has_the_papers_ratios():
    base = {"host": "afbo", "phase": "train", "backend": "triton", "mode": "graph"}
    rows = [base | {"complement": "none", "images_per_s": 1e4}, base | {"complement": "full", "images_per_s": 9e3}]
    text = throughput(rows, {"full": 0.578, "lowrank": 0.768}, "CPU")
    assert text.startswith("<svg")
    assert text != throughput(rows, {"full": 0.778, "lowrank": 0.768}, "CPU")
    assert text == throughput(rows, {"full": 0.578, "lowrank": 0.968}, "CPU")  # which was not measured
    assert "<!-- paper -->" in text  # the legend
    assert "<!-- paper -->" not in throughput(rows, {}, "CPU")


@pytest.mark.parametrize(("smaller", "beside"), [([], True), (["--set", "depth=2"], False)])
def test_the_figure_shows_the_papers_ratios_beside_the_papers_model_alone(tmp_path, monkeypatch, smaller, beside):
    row = {"host": "afbo", "phase": "train", "backend": "torch", "mode": "eager", "rank": 56, "gpu_busy_ms": None}
    row |= {"p20": 1.0, "p80": 1.0, "peak_memory_bytes": None, "floor_share": None}
    rows = [row | {"complement": name, "images_per_s": speed} for name, speed in (("none", 10.0), ("lowrank", 9.0))]
    monkeypatch.setattr(bench, "run_bench", lambda *args, **options: rows)
    out = tmp_path / "bench.json"
    command = ["bench", "--device", "cpu", "--batch", "8", "--complements", "none,lowrank", *smaller, "--out", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    text = out.with_suffix(".svg").read_text()
    assert "Training on CPU, batch 8, bf16" in text
    assert ("<!-- paper -->" in text) == beside
