"""Presets and suites: names, receipts, sizes, and one protocol for all that is compared."""

import dataclasses
import inspect
import re

import pytest

from oqc.experiments import presets, protocol, published
from oqc.experiments.presets import PRESETS
from oqc.experiments.suites import SUITES, plan, run_of
from oqc.models import counting

RECEIPT = re.compile(
    r"(?P<title>.+): (?P<size>\d\.\d\d) M parameters\. `(?P<command>oqc [^`]+)`\. (?P<paper>Paper[^\n]+)\.\n\n"
    r"Ours: (not run yet|\d\d\.\d\d( ± \d\.\d\d)? over \d+ seeds?,"
    r" (\d+ s a run(, (up to )?\d side by side,)?|beside other work) on .+)\."
)
SIZES = {"6_97m": "full_r64", "7_19m": "lowrank_r56", "7_59m": "static_r83"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_docstring_is_a_true_receipt(name):
    found = RECEIPT.fullmatch(inspect.getdoc(PRESETS[name]))
    assert found, inspect.getdoc(PRESETS[name])
    assert found["size"] == f"{counting.parameters(PRESETS[name]().model) / 1e6:.2f}"
    if name in published.ROWS:
        first = published.values(row=name, metric="best")[0]
        spread = "" if first.std is None else f" ± {first.std:.2f}"
        assert found["paper"] == f"Paper ({first.place}): {first.mean:.2f}{spread}"
        for value in published.values(row=name, metric="parameters_m"):
            assert found["size"] == f"{value.mean:.2f}"
    else:
        swept = name in SUITES["rank-sweep"]  # by the paper's figure, without a number
        assert found["paper"] == ("Paper (rank figure (a)): no number" if swept else "Paper: no such run")
    *_, verb, last = found["command"].split()
    assert name in SUITES[last] if verb == "reproduce" else (verb, last) == ("--preset", name)


def test_every_published_row_is_a_preset():
    assert set(published.ROWS) <= set(PRESETS)


@pytest.mark.parametrize(("size", "complement"), SIZES.items())
def test_the_widened_baseline_has_its_counterparts_parameters(size, complement):
    wide, other = (counting.parameters(PRESETS[f"cifar100_{n}"]().model) for n in (f"afbo_{size}", complement))
    assert f"{wide / 1e6:.2f}" == f"{other / 1e6:.2f}" == size.removesuffix("m").replace("_", ".")
    assert abs(wide - other) < 0.001 * other


def test_unknown_presets_are_told():
    with pytest.raises(ValueError, match="did you mean 'cifar100_lowrank_r56'"):
        presets.get("cifar100_lowrnk_r56")
    with pytest.raises(ValueError, match=r"^unknown preset 'tiny_' \(there are tiny_imagenet_afbo, [^:]*\)$"):
        presets.get("tiny_")
    with pytest.raises(ValueError, match=r"^unknown preset 'foo' \(there are cifar100_afbo, .* and 28 more: a") as end:
        presets.get("foo")
    assert len(str(end.value)) < 400


def test_the_suites_of_the_paper():
    assert {name: len(SUITES[name]) for name in SUITES} == {
        "table1": 5, "designs": 5, "capacity": 8, "decomposition": 8, "rank-sweep": 11, "gate-start": 6,
        "hosts": 4, "vit-tiny": 2, "calibration": 3, "all": 33,
    }  # fmt: skip
    assert SUITES["all"][:8] == (*SUITES["table1"], *SUITES["designs"][2:])
    assert len(set(SUITES["all"])) == 33
    in_suites = {name for suite in SUITES.values() for name in suite}
    assert in_suites == {name for name in PRESETS if name.startswith("cifar100")}


def test_seed_by_seed():
    jobs = plan("vit-tiny", seeds=2)
    assert [(job.preset, job.seed) for job in jobs] == [
        ("cifar100_vit_tiny", 0), ("cifar100_vit_tiny_pr", 0), ("cifar100_vit_tiny", 1), ("cifar100_vit_tiny_pr", 1),
    ]  # fmt: skip


def test_all_that_is_compared_is_trained_alike():
    for name in SUITES["all"]:
        run = PRESETS[name]()
        assert (run.data, run.train) == (protocol.CIFAR100_DATA, protocol.CIFAR100_TRAIN)
    for name in SUITES["calibration"]:
        run = PRESETS[name]()
        assert run.model == presets.cifar100_afbo().model
        assert dataclasses.replace(run.train, epochs=1) == dataclasses.replace(protocol.CIFAR100_TRAIN, epochs=1)
    assert len({PRESETS[name]().train.epochs for name in SUITES["calibration"]}) == 3


def test_models_that_differ_differ_on_digits():
    small = [run_of(name, 0, "digits").model for name in SUITES["all"]]
    assert len(set(small)) == len(small)
    ranks = [run_of(f"cifar100_full_r{rank}", 0, "digits").model.ffn.rank for rank in (16, 32, 48, 56, 64)]
    assert ranks == [3, 6, 9, 10, 12]
    sizes = [counting.parameters(run_of(f"cifar100_afbo{n}", 0, "digits").model) for n in ("", "_6_97m", "_7_59m")]
    assert sizes == sorted(set(sizes))
    assert max(counting.parameters(model) for model in small) < 150_000


def test_other_epochs_keep_the_proportion_of_the_calibration():
    usual = protocol.CIFAR100_TRAIN.epochs
    assert run_of("cifar100_afbo", 3).train == dataclasses.replace(protocol.CIFAR100_TRAIN, seed=3)
    assert run_of("cifar100_afbo", 0, epochs=2 * usual).train.epochs == 2 * usual
    assert run_of("cifar100_afbo_50epochs", 0, epochs=2 * usual).train.epochs == 100
    assert run_of("cifar100_afbo", 0, "digits").train.epochs == protocol.DIGITS_TRAIN.epochs
    assert run_of("cifar100_afbo", 0, "digits", 2).train.epochs == 2
