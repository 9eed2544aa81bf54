"""docs/generate.py: README block and receipts from records."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from made_runs import suite

from oqc.experiments.claims import AFBO, FULL

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)

SOURCE = '''
def cifar100_afbo() -> Run:
    """AFBO+PR: 6.37 M parameters. Paper (table 1): 64.25 ± 0.22.

    Ours: not run yet.
    """
    return 1


def cifar100_mlp() -> Run:
    """Has no receipt."""


def cifar100_full_r64() -> Run:
    """OQC full, R 64. Ours: 1.00 over 9 seeds."""


def cifar100_static_r83() -> Run:
    """OQC-static.

    Ours: 2.00 over 2 seeds.
    """
'''


def test_receipts():
    records = suite({}, presets=(AFBO,), seeds=1) + suite({FULL: 1.0}, presets=(FULL,), seeds=2)
    for record, best in zip(records, (64.861, 65.0, 65.5), strict=True):
        record["best"] = best
    del records[1]["seconds"], records[2]["seconds"]
    want = SOURCE.replace("Ours: not run yet.", "Ours: 64.86 over 1 seed, 52 s a run on one NVIDIA H200.")
    want = want.replace("Ours: 1.00 over 9 seeds.", "Ours: 65.25 ± 0.35 over 2 seeds.").replace(
        "Ours: 2.00 over 2 seeds.", "Ours: not run yet."
    )
    assert generate.with_receipts(SOURCE, records) == want
    records[1]["shared_device"] = True
    want = want.replace("± 0.35 over 2 seeds.", "± 0.35 over 2 seeds, beside other work on one NVIDIA H200.")
    assert generate.with_receipts(SOURCE, records) == want


@pytest.fixture
def root(tmp_path):
    for name in (generate.README, generate.PRESETS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def test_documents_with_runs(root):
    path = root / "results" / "cifar100" / "runs.jsonl"
    path.parent.mkdir(parents=True)
    records = suite({FULL: 1.34}, presets=(AFBO, FULL))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    page, files = generate.documents(root)
    block = files["README.md"].partition("<!-- results -->\n")[2].partition("<!-- /results -->\n")[0]
    assert "ours over 4 seeds on one NVIDIA H200" in block
    assert "| OQC full, R 64 | 6.97 M | 65.59 ± 0.22 | " in block
    assert re.search(r"\| \+1\.34 \| \+1\.\d\d \[\+", block)
    assert "| 0.58 | 0.80 |" in block
    assert "1 reproduced" in block
    assert max(len(line) for line in block.splitlines() if not line.startswith("|")) <= 120
    assert "Ours: 6" in files[generate.PRESETS]
    assert "## What holds" in page.text
    for name, text in files.items():  # a second pass changes nothing
        (root / name).write_text(text)
    assert generate.documents(root) == (page, files)


def test_documents_name_runs_that_diverged(root):
    path = root / "results" / "cifar100" / "runs.jsonl"
    path.parent.mkdir(parents=True)
    records = suite({}, presets=(AFBO, FULL))
    lost = ("best", "final", "parameters", "images_per_s", "images_per_s_alone", "mechanism")
    for number in (3, 4, 5, 6, 7):  # one seed of the first, all of the second
        kept = {k: v for k, v in records[number].items() if k not in lost}
        records[number] = kept | {"diverged": {"epoch": 9, "step": 800}}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    _, files = generate.documents(root)
    block = files["README.md"].partition("<!-- results -->\n")[2].partition("<!-- /results -->\n")[0]
    assert f"5 of 8 runs diverged and are in no mean and no claim: {AFBO} (seed 3, in epoch 9)," in " ".join(
        block.split()
    )
    assert "ours over 3 seeds" in block
    assert "| 65.59 ± 0.22 | diverged |" in block
    assert "Ours: diverged." in files[generate.PRESETS]


def test_markers_must_be_there(root):
    (root / "README.md").write_text("no markers\n")
    with pytest.raises(ValueError, match="must have one line <!-- results -->"):
        generate.documents(root)
