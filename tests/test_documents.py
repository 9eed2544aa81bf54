"""What README, docs/results.md and the presets say of our runs is what the records say; what they show runs."""

import importlib.util
import re
from pathlib import Path

import pytest

from oqc.analysis import METRICS, SEPARATION
from oqc.experiments import demo
from oqc.experiments.claims import AFBO
from oqc.experiments.comparison import compare
from oqc.experiments.sections import nearest_separation
from oqc.report import read_records, rows, table

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)


def texts(svg):
    """What a figure says: matplotlib leaves each text as a comment beside its outlines."""
    return re.findall(r"<!-- (.*?) -->", svg)


def test_generated_documents_are_up_to_date():
    page, files = generate.documents(ROOT)
    for name, text in {**files, "docs/results.md": page.text}.items():
        assert (ROOT / name).read_bytes() == text.encode(), f"{name} is not what the records say: run make results"


def test_the_demos_table_is_of_its_records():
    found = {row["preset"]: row for row in rows(read_records(ROOT / "results" / "demo" / "runs.jsonl"))}
    names, body = table([found[name] for name in demo.VARIANTS])
    shown = [place for place, name in enumerate(names) if name != "Images/s"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in body:
        assert f"| {' | '.join(line[place] for place in shown)} |\n" in readme


def test_the_separation_beside_the_papers_is_the_baselines_nearest():
    """docs/metrics.md: chosen by AFBO+PR's runs alone."""
    row = compare(generate.records_of(ROOT)).rows[AFBO]
    assert nearest_separation({name: row[name] for name in METRICS if name.startswith("separation")}) == SEPARATION


def test_figures_are_up_to_date():
    """Byte for byte under the matplotlib that drew them; another one may place a line otherwise, but not say other
    things."""
    page, _ = generate.documents(ROOT)
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / "figures").glob("*.svg")}
    assert there == set(page.figures), "docs/figures is not what the records say: run make results"
    for name, fresh in page.figures.items():
        kept = (ROOT / "docs" / name).read_text(encoding="utf-8")
        creator = re.compile(r"<dc:title>(.*?)</dc:title>")
        if creator.findall(kept) == creator.findall(fresh):
            assert kept == fresh, f"{name} is not what the records say: run make results"
        assert texts(kept) == texts(fresh), f"{name} is not what the records say: run make results"


@pytest.mark.parametrize("name", ["README.md", "docs/integrations.md"])
def test_every_snippet_runs(name, tmp_path, monkeypatch):
    """One after the other, as a reader would; weights start at random, since there may be no network."""
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)
    assert snippets
    space: dict[str, object] = {}
    for snippet in snippets:
        exec(snippet.replace("pretrained=True", "pretrained=False"), space)
