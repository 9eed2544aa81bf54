import itertools
import statistics

import numpy as np
import pytest
from scipy.stats import t

from oqc.report.statistics import (
    Claim,
    Pending,
    assess,
    assess_all,
    cells,
    holm,
    pooled_noise,
    seed_effect,
    verdict,
)


def records(table, **other):
    """{preset: {seed: best}} as records."""
    return [
        {"preset": preset, "seed": seed, "best": best, "mechanism": {}} | other
        for preset, by_seed in table.items()
        for seed, best in by_seed.items()
    ]


# Residuals of the additive fit: grand mean 3; presets 2, 3, 4; seeds 2, 4. Every cell is preset + seed - 3, but for
# ± 0.5 in the first two presets, so the residual sum of squares is 4 / 4 = 1 with (3 - 1) (2 - 1) = 2 degrees.
TABLE = {"a": {0: 1.5, 1: 2.5}, "b": {0: 1.5, 1: 4.5}, "c": {0: 3.0, 1: 5.0}}


def test_pooled_noise_worked_out_by_hand():
    noise = pooled_noise(cells(records(TABLE)))
    assert noise.freedom == 2
    assert noise.variance == pytest.approx(0.5, rel=1e-12)


def test_pooled_noise_is_half_the_mean_variance_of_paired_differences():
    g = np.random.default_rng(0)
    table = {preset: dict(enumerate(g.normal(60, 1, 4))) for preset in "abcde"}
    of_pairs = [
        statistics.variance([table[x][s] - table[y][s] for s in range(4)])
        for x, y in itertools.combinations("abcde", 2)
    ]
    noise = pooled_noise(cells(records(table)))
    assert noise.variance == pytest.approx(statistics.fmean(of_pairs) / 2, rel=1e-10)
    assert noise.freedom == 4 * 3


def test_runs_that_share_nothing_add_no_freedom():
    lonely = {"d": {0: 9.0}, "e": {7: 1.0, 8: 30.0}}
    assert pooled_noise(cells(records(TABLE | lonely))).freedom == 2
    assert pooled_noise(cells(records(TABLE | lonely))).variance == pytest.approx(0.5)
    assert pooled_noise(cells(records(TABLE | {"f": {0: 1.0, 1: 1.0}}))).freedom == 3


def test_a_difference_worked_out_by_hand():
    (found,) = assess([Claim("c beats a", ("c",), ("a",), published=1.0)], records(TABLE))
    # Differences 1.5 and 2.5; error sqrt(0.5 * 2 / 2); t at 97.5% with 2 degrees is 4.30265; its tail is closed there:
    # the two-sided p-value of x is 1 - x / sqrt(2 + x^2).
    assert found.difference == 2.0
    assert (found.seeds, found.freedom) == ((0, 1), 2)
    reach = 4.302652729911275 * 0.5**0.5
    assert (found.low, found.high) == (pytest.approx(2 - reach), pytest.approx(2 + reach))
    x = 2 / 0.5**0.5
    assert found.p == pytest.approx(1 - x / (2 + x**2) ** 0.5)
    assert found.p_holm == found.p
    assert found.verdict == "same sign"
    assert found.published_inside is True


def test_only_common_seeds_are_paired():
    table = {**TABLE, "c": {1: 5.0, 2: 100.0}}
    (found,) = assess([Claim("c", ("c",), ("a",))], records({**table, "b": {0: 1.5, 1: 4.5, 2: 4.0}}))
    assert found.seeds == (1,)
    assert found.difference == 2.5
    assert found.published_inside is None


def test_super_additivity_worked_out_by_hand():
    table = {
        "base": {0: 10.0, 1: 12.0},
        "pr": {0: 11.0, 1: 13.5},
        "lr": {0: 12.0, 1: 14.0},
        "both": {0: 15.0, 1: 17.5},
    }
    (found,) = assess(
        [Claim("more than the sum", ("both", "base"), ("pr", "lr"), published=9.0)],
        records(table),
    )
    # Seed 0: 15 - 11 - 12 + 10 = 2; seed 1: 17.5 - 13.5 - 14 + 12 = 2. Seed effects 2, 2.5, 2, 2.5 around 2.25: the
    # residuals are ± 0.125 in all eight cells, 0.125 over three degrees; error sqrt(0.125 / 3 * 4 / 2).
    assert found.difference == 2.0
    assert found.freedom == 3
    assert found.high - found.low == pytest.approx(2 * t.ppf(0.975, 3) * (0.125 / 3 * 2) ** 0.5)
    assert found.verdict == "reproduced"
    assert found.published_inside is False


def test_a_fit_to_all_runs_worked_out_by_hand():
    """Of two presets with two common seeds, a third run of one says nothing of the difference, until a third preset
    ties its seed to theirs: c has seeds 1 and 2, so seed 2's effect is known, and a's run there tells of a."""
    table = {"a": {0: 1.0, 1: 2.0, 2: 6.0}, "b": {0: 2.0, 1: 4.0}}
    claim = Claim("b beats a", ("b",), ("a",))
    paired, fitted = (assess([claim], records(table), paired=one)[0] for one in (True, False))
    assert (fitted.difference, fitted.low) == (pytest.approx(paired.difference), pytest.approx(paired.low))
    tied = records(table | {"c": {1: 3.0, 2: 4.0}})
    (fitted,) = assess([claim], tied, paired=False)
    # By the normal equations with a = 0: seeds 0 and 1 give b - a = 1 and 2; c bridges 1 and 2 with 3 - 2 and 4 - 6.
    design = np.array([[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1], [0, 1, 0, 1, 0, 0],
                       [0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 1, 0], [0, 0, 1, 0, 0, 1]], dtype=float)  # fmt: skip
    y = np.array([1.0, 2, 6, 2, 4, 3, 4])
    fit = np.linalg.lstsq(design, y, rcond=None)[0]
    assert fitted.difference == pytest.approx(fit[1] - fit[0])
    variance = ((y - design @ fit) ** 2).sum() / 2  # 7 cells, rank 5
    contrast = np.array([-1.0, 1, 0, 0, 0, 0])
    error = (variance * contrast @ np.linalg.pinv(design.T @ design) @ contrast) ** 0.5
    assert fitted.high - fitted.low == pytest.approx(2 * t.ppf(0.975, 2) * error)
    (paired,) = assess([claim], tied)
    assert fitted.high - fitted.low < paired.high - paired.low


def test_holm_worked_out_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("difference", "low", "high", "side", "want"),
    [
        (1.0, 0.1, 1.9, 1, "reproduced"),
        (1.0, 0.1, 1.9, -1, "contradicted"),
        (-1.0, -1.9, -0.1, -1, "reproduced"),
        (-1.0, -1.9, -0.1, 1, "contradicted"),
        (1.0, -0.1, 2.1, 1, "same sign"),
        (1.0, 0.0, 2.0, 1, "same sign"),
        (1.0, -0.1, 2.1, -1, "other sign"),
        (-1.0, -2.1, 0.1, -1, "same sign"),
        (0.0, -1.0, 1.0, 1, "other sign"),
    ],
)
def test_the_rule(difference, low, high, side, want):
    assert verdict(difference, low, high, side) == want


def test_claims_on_the_mechanism_pool_their_own_metric():
    runs = [
        {"preset": p, "seed": s, "best": 0.0, "mechanism": {"effective_rank": rank, "before": None}}
        for p, by_seed in TABLE.items()
        for s, rank in by_seed.items()
    ]
    (found,) = assess([Claim("rank", ("c",), ("a",), metric="effective_rank")], runs)
    assert (found.difference, found.freedom) == (2.0, 2)
    with pytest.raises(ValueError, match="claim 'x': no record of preset 'c' has before"):
        assess([Claim("x", ("c",), ("a",), metric="before")], runs)


def test_no_noise_at_all():
    table = {"a": {0: 1.0, 1: 2.0}, "b": {0: 3.0, 1: 4.0}, "c": {0: 1.0, 1: 2.0}}
    up, level = assess([Claim("up", ("b",), ("a",)), Claim("level", ("c",), ("a",))], records(table))
    assert up.verdict == "reproduced"
    assert level.verdict == "other sign"
    assert up.p < 1e-6
    assert level.p == 1


@pytest.mark.parametrize(
    ("claims", "table", "message"),
    [
        ([Claim("x", ("z",), ("a",))], TABLE, "claim 'x': no record of preset 'z' has best"),
        ([Claim("x", ("d",), ("a",))], TABLE | {"d": {5: 1.0}}, "claim 'x': d, a have no seed in common"),
        ([Claim("x", ("b",), ("a",))], {"a": {0: 1.0}, "b": {0: 2.0}}, "two seeds in common, got 2 runs"),
        ([Claim("x", ("a",), ("b",))], {"a": {0: float("nan")}, "b": {0: 1.0}}, "must be a finite number, got nan"),
    ],
)
def test_mistakes_are_named(claims, table, message):
    with pytest.raises(ValueError, match=message):
        assess(claims, records(table))


def test_mistakes_in_arguments_are_named():
    with pytest.raises(ValueError, match="two records of preset 'a' with seed 0"):
        cells(records(TABLE) + records({"a": {0: 3.0}}))
    with pytest.raises(ValueError, match="claim 'x': plus and minus"):
        Claim("x", ("a", "b"), ("c",))
    with pytest.raises(ValueError, match="claim 'x': plus and minus"):
        Claim("x", ("a",), ("a",))
    with pytest.raises(ValueError, match="side must be 1 or -1"):
        Claim("x", ("a",), ("b",), side=0)
    assert assess([], []) == []


SEEDS = {"balanced": dict.fromkeys("abcdef", 3), "unbalanced": {"a": 6, "b": 6, "c": 3, "d": 2, "e": 2, "f": 2}}


@pytest.mark.parametrize("layout", SEEDS)
def test_coverage_of_the_interval_and_error_of_the_family(layout):
    """2000 made-up protocols with large seed effects: 95% of the intervals hold the truth, within three standard
    errors (1.5 points), and Holm's p-values err in at most 5% of protocols, within the same."""
    g = np.random.default_rng(1)
    claims = [Claim(x, (x,), ("a",)) for x in "bcdef"] + [Claim("more", ("d", "a"), ("b", "c"))]
    trials, inside, family = 2000, np.zeros(len(claims)), 0
    for _ in range(trials):
        seed_effect = g.normal(0, 2, 6)
        table = {p: {s: 60 + seed_effect[s] + g.normal(0, 0.3) for s in range(n)} for p, n in SEEDS[layout].items()}
        found = assess(claims, records(table))
        inside += [f.low <= 0 <= f.high for f in found]
        family += any(f.p_holm < 0.05 for f in found)
    assert inside / trials == pytest.approx(np.full(len(claims), 0.95), abs=0.015)
    assert family / trials < 0.065


def test_claims_that_the_runs_do_not_reach_are_pending():
    claims = [Claim("c beats a", ("c",), ("a",)), Claim("x", ("z",), ("a",)), Claim("d", ("d",), ("a",))]
    table = TABLE | {"d": {7: 1.0}}
    found, missing, apart = assess_all(claims, records(table))
    assert found == assess(claims[:1], records(table))[0]
    assert missing == Pending(claims[1], "not run yet")
    assert apart == Pending(claims[2], "no seed in common")
    (lonely,) = assess_all([Claim("b", ("b",), ("a",))], records({"a": {0: 1.0}, "b": {0: 2.0}}))
    assert lonely.why == "too few seeds"
    assert assess_all(claims[:1], []) == [Pending(claims[0], "not run yet")]
    lost = [{"preset": "d", "seed": 0, "mechanism": {}, "diverged": {"epoch": 1, "step": 2}}]
    assert [one.why for one in assess_all(claims[2:], records(TABLE) + lost)] == ["diverged"]
    assert [one.why for one in assess_all([Claim("x", ("b",), ("a",), metric="before")], records(TABLE))] == [
        "not measured"
    ]


def test_differences_that_cancel_are_zero():
    """Paired differences of +0.1, +0.2 and -0.3 add up to 5.6e-17: rounding, which is on no side."""
    runs = records({"a": {0: 60.0, 1: 60.0, 2: 60.0}, "b": {0: 60.1, 1: 60.2, 2: 59.7}})
    pairs = [runs[k + 3]["best"] - runs[k]["best"] for k in range(3)]
    assert statistics.fmean(pairs) != 0
    (found,) = assess([Claim("b", ("b",), ("a",))], runs)
    assert found.difference == 0
    assert found.verdict == "other sign"
    assert found.p == 1


def test_an_effect_of_the_seeds_worked_out_by_hand():
    """Of TABLE the additive fit leaves 1 over 2 degrees; without seeds each preset's own spread about its mean is left,
    1/2 + 9/2 + 4/2 = 7 over 3. F = (7 - 1) / 1 over 1/2 is 12 with 1 and 2 degrees: the square of a t with 2 degrees,
    whose two-sided p at x is 1 - x / sqrt(2 + x^2)."""
    x = 12**0.5
    assert seed_effect(cells(records(TABLE))) == pytest.approx(1 - x / (2 + x**2) ** 0.5)


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"a": {0: 1.0}, "b": {0: 2.0}},  # nothing left to judge by
        {"a": {0: 1.0, 1: 2.0}, "b": {2: 3.0, 3: 5.0}},  # presets apart: no seed has two
        {"a": {0: 1.0, 1: 1.0}, "b": {0: 1.0, 1: 1.0}},  # nothing varies
    ],
)
def test_no_effect_of_the_seeds_can_be_told(table):
    assert seed_effect(cells(records(table))) is None
