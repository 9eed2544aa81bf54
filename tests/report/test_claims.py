"""The claims: sizes and sides are the paper's own, every preset exists, planted truths come out."""

import math

import pytest
from made_runs import run, suite

from oqc.analysis import SEPARATION
from oqc.experiments import comparison
from oqc.experiments.claims import AFBO, BETWEEN, BY_NUMBERS, CLAIMS, FULL, LOWRANK, OURS, STATEMENTS, STATIC, TESTED
from oqc.experiments.presets import PRESETS
from oqc.experiments.published import value
from oqc.experiments.suites import SUITES
from oqc.report.statistics import Finding, Pending

BY_NAME = {claim.name: claim for claim in CLAIMS}


def test_claims_name_presets_that_a_suite_runs():
    assert len(BY_NAME) == len(CLAIMS)
    for claim in CLAIMS:
        assert set(claim.presets) <= set(SUITES["all"]) & set(PRESETS)
        assert claim.place
        assert "likely" in claim.reason
        assert not claim.reason.endswith(".")


def test_every_claim_stands_under_one_statement_of_its_asker():
    under = [claim for claims in STATEMENTS.values() for claim in claims]
    assert len(under) == len(CLAIMS)
    assert set(under) == set(CLAIMS)
    for statement, claims in STATEMENTS.items():
        assert {claim.place == OURS for claim in claims} == {statement.startswith("Ours: ")}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("OQC full beats AFBO+PR", 1.34),
        ("OQC full beats OQC-LR", 0.07),
        ("OQC full: R 64 beats R 16", 0.86),
        ("OQC-LR adds to the MLP", 3.48),
        ("Super-additive on AFBO", 0.33),
        ("PR adds more to AFBO than to the MLP", 0.93),
        ("Effective rank: OQC full over AFBO+PR", 1.53),
        ("Participation ratio: OQC full over OQC-dynamic", 0.47),
        ("Separation: OQC-dynamic over AFBO+PR", 0.0084),
        ("The dynamic gate opens less than static", -0.06),
    ],
)
def test_sizes_are_the_papers(name, size):
    assert BY_NAME[name].published == pytest.approx(size, abs=1e-9)
    assert BY_NAME[name].side == (1 if size > 0 else -1)


def test_no_size_across_protocols_or_of_our_own_questions():
    for claim in CLAIMS:
        if claim.place in (OURS, "alternative designs"):
            assert claim.published is None
        elif claim.place not in ("rank figure (a)",) and claim.metric != "gate_std":
            assert claim.published is not None


def test_static_lies_between_the_extremes_by_the_papers_own_numbers():
    assert {claim.plus for claim in BETWEEN} == {(STATIC,)}
    assert {(claim.minus, claim.metric) for claim in BETWEEN} == {
        (("cifar100_dynamic_r83",), "effective_rank"),
        (("cifar100_dynamic_r83",), "participation_ratio"),
        ((FULL,), SEPARATION),
    }
    assert {claim.side for claim in BETWEEN} == {1}


def test_what_the_paper_says_in_no_words_and_what_is_tested_are_claims():
    assert len(BY_NUMBERS) == 4
    assert all(claim.place != OURS for claim in BY_NUMBERS)
    for reason, (test, _) in TESTED.items():
        assert test.place == OURS
        assert any(claim.reason == reason for claim in CLAIMS)


def test_what_is_called_too_small_is_so_by_the_papers_own_spread():
    small = [claim for claim in CLAIMS if "less than two standard errors" in claim.reason]
    assert len(small) == 5
    for claim in small:
        error = math.sqrt(sum(value(claim.place, preset).std ** 2 for preset in claim.presets) / 3)
        assert 0 < claim.published < 2 * error


def test_planted_truths():
    effects = {FULL: 1.34, LOWRANK: -1.0, "cifar100_unprojected_r56": 0.8, "cifar100_afbo_6_97m": 0.2}
    found = comparison.compare(suite(effects)).findings
    assert all(isinstance(one, Finding) for one in found.values())
    assert found[BY_NAME["OQC full beats AFBO+PR"]].verdict == "reproduced"
    assert found[BY_NAME["OQC full beats AFBO+PR"]].published_inside
    assert found[BY_NAME["OQC-LR beats AFBO+PR"]].verdict == "contradicted"
    assert found[BY_NAME["Without the projection: below AFBO+PR"]].verdict == "contradicted"
    assert found[BY_NAME["OQC full beats AFBO+PR of 6.97 M"]].verdict == "reproduced"
    assert found[BY_NAME["OQC-static beats OQC-dynamic"]].verdict in ("same sign", "other sign")


def test_what_is_not_there_is_pending():
    found = comparison.compare(suite({FULL: 1.0}, presets=(AFBO, FULL))).findings
    assert found[BY_NAME["OQC full beats AFBO+PR"]].verdict == "reproduced"
    missing = BY_NAME["OQC-LR beats AFBO+PR"]
    assert found[missing] == Pending(missing, "not run yet")
    one_seed = comparison.compare(suite({FULL: 1.0}, presets=(AFBO, FULL), seeds=1)).findings
    assert one_seed[BY_NAME["OQC full beats AFBO+PR"]].why == "too few seeds"
    assert {one.why for one in comparison.compare([]).findings.values()} == {"not run yet"}


def test_calibration_runs_do_not_bear_on_the_variance():
    records = suite({FULL: 1.0}, presets=(AFBO, FULL))
    far = [run("cifar100_afbo_50epochs", seed, 64 + 5 * seed) for seed in range(4)]
    with_far, without = comparison.compare(records + far), comparison.compare(records)
    claim = BY_NAME["OQC full beats AFBO+PR"]
    assert with_far.findings[claim] == without.findings[claim]
    assert "cifar100_afbo_50epochs" in with_far.rows


def test_a_baseline_of_two_protocols_is_refused():
    records = suite({}, presets=(AFBO,))
    records[1]["config"]["train"]["epochs"] = 7
    with pytest.raises(ValueError, match="cifar100_afbo must be of one protocol, got 2"):
        comparison.compare(records)
