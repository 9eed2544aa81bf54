"""Claims against records: the seed-paired difference, its interval, a corrected p-value and a verdict.

The model behind it: y[preset, seed] = mean of the preset + effect of the seed + noise, with one noise variance s^2 for
all cells (preset, seed) of the protocol. s^2 is pooled: the residual mean square of this fit over every cell given,
with N - rank degrees of freedom ((presets - 1) (seeds - 1) where every preset has every seed; 2 s^2 is then the mean,
over all pairs of presets, of the sample variance of their paired differences). So two or three seeds a row still give
an interval, and a claim may even rest on one.

A claim is a contrast, presets added minus as many presets taken away. It is formed seed by seed over the seeds that
all its presets have, so the seed's effect cancels; its mean over k seeds has variance s^2 (number of presets) / k.
The least-squares estimate of the same contrast, which takes in the runs without a partner too, is there to compare.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Cells = dict[tuple[str, int], float]
LEVEL = 0.95  # of every interval
SETTLED = 0.05  # p after Holm's correction
ROUNDING = 1e-12
VERDICTS = ("reproduced", "contradicted", "same sign", "other sign")


@dataclass(frozen=True)
class Claim:
    """The paper says that sum(plus) - sum(minus) of a metric has the sign `side`, and `published` is its size there.

    `metric` is a field of a record or of its `mechanism`; `place` is where the paper says so; `reason` is what a page
    gives as the likely reason where the runs point the other way. `late`: written down when its runs were seen already.
    """

    name: str
    plus: tuple[str, ...]
    minus: tuple[str, ...]
    side: Literal[1, -1] = 1
    published: float | None = None
    metric: str = "best"
    place: str = ""
    reason: str = ""
    late: bool = False

    def __post_init__(self) -> None:
        if self.side not in (1, -1):
            raise ValueError(f"claim {self.name!r}: side must be 1 or -1, got {self.side}")
        if not self.plus or len(self.plus) != len(self.minus) or len(set(self.presets)) < len(self.presets):
            raise ValueError(
                f"claim {self.name!r}: plus and minus must name equally many presets, each once,"
                f" got {self.plus} and {self.minus}"
            )

    @property
    def presets(self) -> tuple[str, ...]:
        return self.plus + self.minus


@dataclass(frozen=True)
class Noise:
    """The pooled variance of one cell, with its degrees of freedom."""

    variance: float
    freedom: int


@dataclass(frozen=True)
class Finding:
    """What the records say of a claim. `low` to `high` is the claim's own interval; `p_holm` is corrected for all
    claims assessed together. `published_inside` is None where the paper gives no size."""

    claim: Claim
    difference: float
    low: float
    high: float
    seeds: tuple[int, ...]
    freedom: int
    p: float
    p_holm: float
    verdict: str
    published_inside: bool | None


@dataclass(frozen=True)
class Pending:
    """A claim that the records do not reach yet, and why."""

    claim: Claim
    why: Literal["not run yet", "diverged", "no seed in common", "not measured", "too few seeds"]


def cells(records: Sequence[dict[str, Any]], metric: str = "best") -> Cells:
    """The metric by (preset, seed); records without it are left out."""
    found: Cells = {}
    seen: set[tuple[str, int]] = set()
    for record in records:
        cell = record["preset"], record["seed"]
        if cell in seen:
            raise ValueError(f"two records of preset {cell[0]!r} with seed {cell[1]}")
        seen.add(cell)
        value = record.get(metric, record.get("mechanism", {}).get(metric))
        if value is None:
            continue
        if not math.isfinite(value):
            raise ValueError(f"{metric} of preset {cell[0]!r} with seed {cell[1]} must be a finite number, got {value}")
        found[cell] = float(value)
    return found


def pooled_noise(of: Cells) -> Noise:
    """Residual mean square of the additive fit of presets and seeds to all cells."""
    squares, freedom = _residuals(of)
    if freedom < 1:
        presets, seeds = ({cell[k] for cell in of} for k in (0, 1))
        raise ValueError(
            f"a pooled variance needs two presets with at least two seeds in common, got {len(of)} runs"
            f" of {len(presets)} presets over {len(seeds)} seeds"
        )
    return Noise(squares / freedom, freedom)


def seed_effect(of: Cells) -> float | None:
    """p of the F test that seeds have an effect of their own, beside the presets'; None where cells are too few."""
    from scipy.stats import f

    (with_seeds, freedom), (without, more) = _residuals(of), _residuals(of, seeds=False)
    if freedom < 1 or more == freedom or not with_seeds:
        return None
    ratio = ((without - with_seeds) / (more - freedom)) / (with_seeds / freedom)
    return float(f.sf(ratio, more - freedom, freedom))


def _residuals(of: Cells, *, seeds: bool = True) -> tuple[float, int]:
    """What the additive fit leaves: a sum of squares, and its degrees of freedom."""
    y = np.array(list(of.values()))
    y = y - y.mean() if len(y) else y
    design = _design(of, seeds)
    fit, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    left = y - design @ fit
    return float(left @ left), len(y) - int(rank)


def _design(of: Cells, seeds: bool = True) -> np.ndarray:
    """A column a preset, in order of first appearance, then one a seed."""
    names = [preset for preset, _ in of], [seed for _, seed in of if seeds]
    columns = [np.array([one == name for one in given]) for given in names for name in dict.fromkeys(given)]
    return np.column_stack(columns).astype(float) if columns else np.zeros((0, 0))


def assess(claims: Sequence[Claim], records: Sequence[dict[str, Any]], *, paired: bool = True) -> list[Finding]:
    """A finding a claim, in their order. `records` are all runs of one protocol: they all go into the variance. Without
    `paired` the contrasts are fitted to all of them."""
    by_metric = {metric: cells(records, metric) for metric in dict.fromkeys(claim.metric for claim in claims)}
    pairs_of = [_paired(claim, by_metric[claim.metric]) for claim in claims]
    noise = {metric: pooled_noise(of) for metric, of in by_metric.items()}
    tests = []
    for claim, pairs in zip(claims, pairs_of, strict=True):
        share = len(claim.presets) / len(pairs)
        difference = _sum([one / len(pairs) for one in pairs.values()])
        estimate = (difference, share) if paired else _fitted(claim, by_metric[claim.metric])
        tests.append(_test(*estimate, noise[claim.metric]))
    corrected = holm([p for *_, p in tests])
    return [
        Finding(
            claim=claim,
            difference=difference,
            low=difference - reach,
            high=difference + reach,
            seeds=tuple(pairs),
            freedom=noise[claim.metric].freedom,
            p=p,
            p_holm=p_holm,
            verdict=verdict(difference, difference - reach, difference + reach, claim.side),
            published_inside=None if claim.published is None else abs(claim.published - difference) <= reach,
        )
        for claim, pairs, (difference, reach, p), p_holm in zip(claims, pairs_of, tests, corrected, strict=True)
    ]


def assess_all(
    claims: Sequence[Claim], records: Sequence[dict[str, Any]], *, paired: bool = True
) -> list[Finding | Pending]:
    """As `assess`, with a `Pending` for each claim whose runs are not there, lack its metric, or are too few for any
    variance."""
    ran = {(record["preset"], record["seed"]) for record in records}
    ended = {(record["preset"], record["seed"]) for record in records if "diverged" not in record}
    by_metric = {metric: cells(records, metric) for metric in dict.fromkeys(claim.metric for claim in claims)}
    varies = {metric: _has_noise(of) for metric, of in by_metric.items()}
    pending: dict[Claim, Pending] = {}
    for claim in claims:
        if not _all_among(claim, ran):
            pending[claim] = Pending(claim, "not run yet")
        elif not _all_among(claim, ended):
            pending[claim] = Pending(claim, "diverged")
        elif not _all_among(claim, by_metric[claim.metric]):
            pending[claim] = Pending(claim, "not measured")
        elif not _common_seeds(claim, by_metric[claim.metric]):
            pending[claim] = Pending(claim, "no seed in common")
        elif not varies[claim.metric]:
            pending[claim] = Pending(claim, "too few seeds")
    found = iter(assess([claim for claim in claims if claim not in pending], records, paired=paired))
    return [pending[claim] if claim in pending else next(found) for claim in claims]


def _has_noise(of: Cells) -> bool:
    try:
        pooled_noise(of)
    except ValueError:
        return False
    return True


def _all_among(claim: Claim, of: Collection[tuple[str, int]]) -> bool:
    """Whether every preset of the claim has a run there."""
    return set(claim.presets) <= {name for name, _ in of}


def _common_seeds(claim: Claim, of: Collection[tuple[str, int]]) -> list[int]:
    """The seeds that all presets of the claim have."""
    return sorted(set.intersection(*({seed for name, seed in of if name == preset} for preset in claim.presets)))


def _paired(claim: Claim, of: Cells) -> dict[int, float]:
    """The contrast by seed, over the seeds that all presets of the claim have."""
    for preset in claim.presets:
        if not any(name == preset for name, _ in of):
            raise ValueError(f"claim {claim.name!r}: no record of preset {preset!r} has {claim.metric}")
    common = _common_seeds(claim, of)
    if not common:
        raise ValueError(f"claim {claim.name!r}: {', '.join(claim.presets)} have no seed in common")
    return {
        seed: sum(of[preset, seed] for preset in claim.plus) - sum(of[preset, seed] for preset in claim.minus)
        for seed in common
    }


def _sum(terms: Sequence[float]) -> float:
    """0 for terms that cancel but for their rounding."""
    total = math.fsum(terms)
    return 0.0 if abs(total) < ROUNDING * max(map(abs, terms)) else total


def _fitted(claim: Claim, of: Cells) -> tuple[float, float]:
    """The contrast of the additive fit to all cells, and its variance as a share of a cell's."""
    presets, design = list(dict.fromkeys(preset for preset, _ in of)), _design(of)
    contrast = np.zeros(design.shape[1])
    for names, sign in ((claim.plus, 1.0), (claim.minus, -1.0)):
        contrast[[presets.index(name) for name in names]] = sign
    weights = contrast @ np.linalg.pinv(design)
    return _sum([float(weight) * y for weight, y in zip(weights, of.values(), strict=True)]), float(weights @ weights)


def _test(difference: float, share: float, noise: Noise) -> tuple[float, float, float]:
    """The difference, half the interval's width, two-sided p-value; `share` is the difference's variance over a
    cell's."""
    from scipy.stats import t

    error = math.sqrt(noise.variance * share)
    if not error:  # every cell is the sum of its preset and its seed: nothing is left to chance
        return difference, 0.0, float(difference == 0)
    reach = float(t.ppf((1 + LEVEL) / 2, noise.freedom)) * error
    return difference, reach, float(2 * t.sf(abs(difference) / error, noise.freedom))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the k-th smallest of n times n - k + 1, at most 1 and never below one before it."""
    order = sorted(range(len(p)), key=p.__getitem__)
    steps = itertools.accumulate((min(1.0, (len(p) - k) * p[i]) for k, i in enumerate(order)), max)
    return [value for _, value in sorted(zip(order, steps, strict=True))]


def verdict(difference: float, low: float, high: float, side: Literal[1, -1] = 1) -> str:
    """The rule, fixed before any run: by the interval where it excludes 0, else by the sign (0 counts as other)."""
    if low > 0 or high < 0:
        return "reproduced" if difference * side > 0 else "contradicted"
    return "same sign" if difference * side > 0 else "other sign"
