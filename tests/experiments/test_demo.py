import json
import re

import pytest

from oqc.config import Run, from_dict
from oqc.experiments import demo
from oqc.models import counting
from oqc.report import read_records


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    return out, demo.run_demo(out, seeds=(0,), epochs=1)


def test_every_variant_leaves_a_record(records):
    out, found = records
    assert [r["preset"] for r in found] == list(demo.VARIANTS)
    written = read_records(out / demo.RESULTS)  # as they ended
    assert sorted(written, key=lambda r: list(demo.VARIANTS).index(r["preset"])) == json.loads(json.dumps(found))


def test_records_hold_what_was_run(records):
    for record in records[1]:
        assert 0 <= record["best"] <= 100
        assert record["images_per_s"] > 0
        assert record["config"]["train"]["epochs"] == 1
        assert [p["epoch"] for p in record["per_epoch"]] == [1]
        config = from_dict(Run, record["config"])
        assert record["parameters"] == counting.parameters(config.model)
        assert (record["mechanism"]["before"] is None) == (record["preset"] == "AFBO+PR")


def test_training_is_paired_and_repeatable(records, tmp_path):
    again = demo.run_demo(tmp_path, seeds=(0,), epochs=1)
    for old, new in zip(records[1], again, strict=True):
        assert (old["best"], old["per_epoch"], old["mechanism"]) == (new["best"], new["per_epoch"], new["mechanism"])
    assert not re.search(r"/root|/home", json.dumps(again[0]["config"]))
