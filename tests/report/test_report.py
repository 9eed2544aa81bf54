import json
import math
import re

import pytest

from oqc.files import write_whole
from oqc.report import append_record, read_records, rows, table
from oqc.report.page import write_page


def record(preset="AFBO+PR", seed=0, best=90.0, before=0.2, **other):
    mechanism = {"before": before, "after": before and 1e-8, "chance": before and 0.1, "gate_mean": 0.1}
    return {
        "preset": preset,
        "seed": seed,
        "best": best,
        "final": best - 1,
        "parameters": 1234567,
        "images_per_s": 1000.0 + seed,
        "per_epoch": [{"epoch": e, "test": best - 5 + e} for e in (1, 2, 3)],
        "mechanism": mechanism,
        "config": {},
        "environment": {"python": "3.11"},
    } | other


def test_rows_are_mean_and_sample_standard_deviation():
    got = rows([record(seed=0, best=90.0), record(preset="b", best=50), record(seed=1, best=92.0)])
    assert [row["preset"] for row in got] == ["AFBO+PR", "b"]
    assert (got[0]["mean"], got[0]["std"], got[0]["seeds"]) == (91.0, pytest.approx(2**0.5), 2)
    assert got[1]["std"] is None


def test_table_cells():
    _, body = table(rows([record(seed=0), record(seed=1, best=92.0), record(preset="none", before=None)]))
    assert body[0] == ["AFBO+PR", "91.00 ± 1.41", "1,234,567", "1,000", "0.200", "1.0e-08"]
    assert body[1][4:] == ["–", "–"]


def test_speeds_of_two_versions_of_the_code_are_not_set_beside_each_other():
    old, new = ({"environment": {"device": "cpu", "commit": commit}} for commit in "ab")
    same = rows([record(**old), record(preset="b", **old)])
    assert [row["images_per_s"] for row in same] == [1000.0, 1000.0]
    assert [row["images_per_s"] for row in rows([record(**old), record(preset="b", **new)])] == [None, None]


def test_empty_lines_are_no_records(tmp_path):
    path = tmp_path / "runs.jsonl"
    append_record(path, record())
    path.write_bytes(b"\n" + path.read_bytes() + b"\n  \n")
    append_record(path, record(seed=1))
    assert [r["seed"] for r in read_records(path)] == [0, 1]


def test_append_and_read(tmp_path):
    path = tmp_path / "results" / "runs.jsonl"
    append_record(path, record())
    append_record(path, record(seed=1))
    assert [r["seed"] for r in read_records(path)] == [0, 1]


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "runs.jsonl"
    append_record(path, record())
    with path.open("a") as file:
        file.write('{"preset": "AF')
    assert len(read_records(path)) == 1
    append_record(path, record(seed=1))
    assert [r["seed"] for r in read_records(path)] == [0, 1]


def test_a_record_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "runs.jsonl"
    append_record(path, record())
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert len(read_records(path)) == 1
    append_record(path, record(seed=1))
    assert [r["seed"] for r in read_records(path)] == [0, 1]
    assert path.read_bytes().count(b"\n") == 2


def test_nothing_is_left_of_a_file_that_could_not_be_put_in_place(tmp_path):
    (tmp_path / "page.md").mkdir()
    with pytest.raises(OSError, match=r"page\.md"):
        write_whole(tmp_path / "page.md", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", "line 1: not a JSON object"),
        ('{"preset": 1}\n', "line 1: the record has no seed, best"),
        ("[]\n", "line 1"),
        ('{"diverged": {}}\n', "line 1: the record has no preset, seed, per_epoch, config, environment"),
        (json.dumps(record(seed=1) | {"diverged": {"epoch": 1}}) + "\n", "line 1: diverged cannot be {'epoch': 1}"),
        ("\x00\xff\xfe\n", "line 1: not a JSON object"),
        ("[" * 100_000 + "\n", "line 1: not a JSON object"),
        (json.dumps(record(seed=1) | {"at_once": 0}) + "\n", "line 1: at_once cannot be 0"),
        (json.dumps(record(seed=1) | {"seconds": "x"}) + "\n", "line 1: seconds cannot be 'x'"),
        (json.dumps(record(seed=1) | {"seconds": math.nan}) + "\n", "line 1: seconds cannot be nan"),
        (json.dumps(record(seed=1) | {"best": True}) + "\n", "line 1: best cannot be True"),
        (
            json.dumps(record(seed=1) | {"environment": {"versions": "x"}}) + "\n",
            "line 1: versions of environment cannot be 'x'",
        ),
        (json.dumps(record(seed=1)) + "\n" + json.dumps(record()) + "\n", r"line 3: AFBO\+PR, seed 0 is in line 2"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    path = tmp_path / "runs.jsonl"
    path.write_bytes((text + json.dumps(record()) + "\n").encode("latin-1"))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}, {message}"):
        read_records(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no results file at .*none\.jsonl"):
        read_records(tmp_path / "none.jsonl")


def test_page_is_self_contained_and_escapes(tmp_path):
    path = tmp_path / "report.html"
    write_page(
        path, [record(preset="<b>"), record(preset="<b>", seed=1), record(preset="two")], title="t & t", lead="l"
    )
    text = path.read_text()
    assert "&lt;b&gt;" in text
    assert "t &amp; t" in text
    assert "<svg" in text
    assert "<script" not in text
    assert not re.search(r'(src|href)="(?!#)', text)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    write_page(
        path, [record(preset="<b>"), record(preset="<b>", seed=1), record(preset="two")], title="t & t", lead="l"
    )
    assert path.read_text() == text  # the same records give the same bytes
