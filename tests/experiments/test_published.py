"""The paper's numbers against the sums and rankings its own text states."""

from collections import Counter

import pytest

from oqc.experiments import published
from oqc.experiments.published import VALUES, difference, value, values
from oqc.models.registry import MODELS


def gain(place, row, over):
    return difference(value(place, row), value(place, over))


def test_every_number_is_there_once():
    assert Counter(v.place for v in VALUES) == {
        "table 1": 15,
        "table 2": 15,
        "table 3": 20,
        "table 4": 8,
        "rank sweep": 4,
        "alternative designs": 3,
        "rank figure (b)": 3,
        "mechanism text": 9,
        "method text": 3,
        "limitations": 2,
    }
    assert max(Counter((v.place, v.row, v.metric) for v in VALUES).values()) == 1
    assert set(published.METRICS) == {
        "best", "parameters_m", "images_per_s", "effective_rank", "participation_ratio", "separation", "before",
        "after", "gate_mean", "gate_std",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "row", "over", "stated"),
    [
        ("table 1", "cifar100_full_r64", "cifar100_afbo", 1.34),
        ("table 2", "tiny_imagenet_lowrank_r56", "tiny_imagenet_afbo", 0.90),
        ("table 2", "tiny_imagenet_dynamic_r83", "tiny_imagenet_afbo", 1.43),
        ("table 4", "cifar100_mlp", "cifar100_mlp_nopr", 0.02),
        ("table 4", "cifar100_afbo", "cifar100_afbo_nopr", 0.95),
        ("table 4", "cifar100_mlp_lowrank_r56_nopr", "cifar100_mlp_nopr", 3.48),
        ("table 4", "cifar100_lowrank_r56_nopr", "cifar100_afbo_nopr", 1.06),
        ("table 4", "cifar100_lowrank_r56", "cifar100_afbo_nopr", 2.34),
    ],
)
def test_gains_the_text_states(place, row, over, stated):
    assert gain(place, row, over) == pytest.approx(stated, abs=1e-9)


def test_super_additivity_as_stated():
    both = gain("table 4", "cifar100_lowrank_r56", "cifar100_afbo_nopr")
    apart = gain("table 4", "cifar100_afbo", "cifar100_afbo_nopr") + gain(
        "table 4", "cifar100_lowrank_r56_nopr", "cifar100_afbo_nopr"
    )
    assert apart == pytest.approx(2.01, abs=1e-9)
    assert both > apart


@pytest.mark.parametrize(
    ("place", "metric", "first"),
    [
        ("table 1", "best", "cifar100_full_r64"),
        ("table 1", "images_per_s", "cifar100_afbo"),
        ("table 2", "best", "tiny_imagenet_dynamic_r83"),
        ("table 2", "images_per_s", "tiny_imagenet_afbo"),
        ("table 3", "best", "cifar100_static_r83"),
        ("table 3", "effective_rank", "cifar100_full_r64"),
        ("table 3", "participation_ratio", "cifar100_full_r64"),
        ("table 3", "separation", "cifar100_dynamic_r83"),
        ("table 4", "best", "cifar100_lowrank_r56"),
    ],
)
def test_the_rows_set_in_bold_are_the_highest(place, metric, first):
    assert max(values(place, metric=metric), key=lambda v: v.mean).row == first


def test_what_the_text_says_of_the_ablations():
    sweep = values("rank sweep", metric="best")
    assert [v.mean for v in sweep] == sorted(v.mean for v in sweep)
    baseline = value("rank sweep", "cifar100_afbo")
    assert baseline.mean == value("table 1", "cifar100_afbo").mean
    for row in ("cifar100_shared_r56", "cifar100_unprojected_r56", "cifar100_ungated_r56"):
        with pytest.raises(ValueError, match="one protocol"):  # they have no baseline of their own
            difference(value("alternative designs", row), baseline)
    assert min(values("table 2", metric="best"), key=lambda v: v.std or 9).row == "tiny_imagenet_static_r83"


def test_where_the_paper_gives_two_figures_of_one_thing_a_remark_says_so():
    for protocol in ("cifar100 mechanism", "cifar100 decomposition", "cifar100 rank sweep"):
        (afbo,) = values(protocol=protocol, row="cifar100_afbo", metric="best")
        assert "table" in afbo.remark
    (full,) = values("rank sweep", row="cifar100_full_r64")
    assert "65.59" in full.remark
    assert {v.mean for v in values(row="cifar100_dynamic_r83", metric="gate_mean")} == {0.11, 0.130}
    assert all(v.remark for v in values(row="cifar100_dynamic_r83", metric="gate_mean"))
    assert all(v.remark for v in values("rank figure (b)", metric="images_per_s"))


@pytest.mark.parametrize(
    ("place", "data", "model"), [("table 1", "cifar100", "{}"), ("table 2", "tiny_imagenet", "{}_64px")]
)
def test_rows_of_the_main_tables_are_models_of_ours(place, data, model):
    for v in values(place, metric="best"):
        suffix = v.row.removeprefix(data).removeprefix("_afbo")
        assert model.format(f"deep_vit_afbo{suffix}") in MODELS


def test_differences_across_protocols_or_metrics_are_refused():
    main, mechanism = value("table 1", "cifar100_full_r64"), value("table 3", "cifar100_afbo")
    with pytest.raises(ValueError, match=r"one protocol.*'cifar100 main'.*'cifar100 mechanism'"):
        difference(main, mechanism)
    with pytest.raises(ValueError, match="one metric"):
        difference(main, value("table 1", "cifar100_full_r64", "images_per_s"))


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match="did you mean 'table 1'"):
        values("table1")
    with pytest.raises(ValueError, match="no gate_mean of cifar100_afbo in its table 1"):
        value("table 1", "cifar100_afbo", "gate_mean")
