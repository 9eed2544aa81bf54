"""A results file beside the paper: a row a preset, a finding a claim, and what the figures show of both."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oqc.analysis import SEPARATION
from oqc.experiments import published
from oqc.experiments.claims import AFBO, CLAIMS, COMPLEMENTS, MAIN
from oqc.experiments.presets import PRESETS
from oqc.experiments.suites import SUITES
from oqc.report import Record, finished, rows
from oqc.report.paper_figures import Point, Values
from oqc.report.provenance import commit_of, config_of, protocol_of
from oqc.report.records import speed_of
from oqc.report.statistics import Claim, Finding, Pending, assess_all

DATA = "cifar100"  # what the claims are about
CLASSES = 100  # of it, with 100 test images each
SCHEDULES = frozenset(SUITES["calibration"]) - {AFBO}  # presets that differ from the baseline in their epochs alone


@dataclass(frozen=True)
class Comparison:
    """`frozen` are the records trained as the baseline was: they alone bear on claims, and all of them on the variance.
    `rows` is by preset, of these and of the calibration; `findings` by claim. `left_out` are the rest: runs of another
    schedule, or of another model than their preset's. `diverged` are runs beside all of these."""

    records: Sequence[Record]
    frozen: Sequence[Record]
    left_out: Sequence[Record]
    diverged: Sequence[Record]
    rows: dict[str, dict[str, Any]]
    findings: dict[Claim, Finding | Pending]

    def gain(self, preset: str, base: str = AFBO) -> Finding | None:
        """The preset over its base, where both were run with seeds enough."""
        (found,) = assess_all([Claim(f"gain of {preset}", (preset,), (base,))], self.frozen)
        return found if isinstance(found, Finding) else None

    def speed(self, preset: str) -> float | None:
        """Training throughput as a share of AFBO+PR's, as far as one version of the code trained both."""
        pairs = self._speeds(preset)
        return statistics.fmean(own / base for own, base in pairs) if pairs else None

    def images_per_s(self, preset: str) -> float | None:
        """Training throughput by the versions of the code that trained AFBO+PR too."""
        pairs = self._speeds(preset)
        return statistics.fmean(own for own, _ in pairs) if pairs else None

    def latest_speed(self, preset: str) -> tuple[float, str] | None:
        """Training throughput by the last version of the code that it was measured with, and that version's commit."""
        found = [record for record in self.frozen if record["preset"] == preset and speed_of(record)]
        if not found:
            return None
        return _speeds(found, preset)[found[-1]["environment"].get("commit")], commit_of(found[-1])

    def _speeds(self, preset: str) -> list[tuple[float, float]]:
        """Images/s of a preset and of AFBO+PR, for each version of the code that has both."""
        own, base = (_speeds(self.frozen, name) for name in (preset, AFBO))
        return [(own[commit], base[commit]) for commit in own if commit in base]


def compare(records: Sequence[Record]) -> Comparison:
    diverged = [record for record in records if "diverged" in record]
    records = [_with_centroids(record) for record in finished(records)]
    frozen = _frozen(records)
    of_protocol = set(map(id, frozen))
    frozen = [_without_fixed_gate(record) for record in frozen]
    kept = [id(record) in of_protocol or record["preset"] in SCHEDULES for record in records]
    return Comparison(
        records,
        frozen,
        [record for record, told in zip(records, kept, strict=True) if not told],
        diverged,
        {row["preset"]: row for row in rows(list(itertools.compress(records, kept)))},
        dict(zip(CLAIMS, assess_all(CLAIMS, [*frozen, *diverged]), strict=True)),
    )


def _speeds(records: Sequence[Record], preset: str) -> dict[str | None, float]:
    """Images per second by the commit they were measured at."""
    found: dict[str | None, list[float]] = {}
    for record in records:
        speed = speed_of(record)
        if record["preset"] == preset and speed:
            found.setdefault(record["environment"].get("commit"), []).append(speed)
    return {commit: statistics.median(speeds) for commit, speeds in found.items()}


def _frozen(records: Sequence[Record]) -> list[Record]:
    """The runs of their preset's own model, trained as AFBO+PR was; without it, as most were."""
    protocols = [protocol_of(config_of(record)) for record in records]
    of_baseline = {one for one, record in zip(protocols, records, strict=True) if record["preset"] == AFBO}
    if len(of_baseline) > 1:
        raise ValueError(f"the records of {AFBO} must be of one protocol, got {len(of_baseline)}")
    if not records:
        return []
    frozen = of_baseline.pop() if of_baseline else Counter(protocols).most_common(1)[0][0]
    kept = [record for one, record in zip(protocols, records, strict=True) if one == frozen]
    return [record for record in kept if config_of(record).model == PRESETS[record["preset"]]().model]


def _with_centroids(record: Record) -> Record:
    """With the separation by centroids, which the first records lack: where classes are of one size, as here, it is a
    function of the scatter's."""
    metrics = record["mechanism"]
    if "separation_centroids" in metrics or metrics.get("separation_scatter") is None:
        return record
    value = math.sqrt(2 * CLASSES / (CLASSES - 1) * metrics["separation_scatter"])
    return record | {"mechanism": {**metrics, "separation_centroids": value}}


def _without_fixed_gate(record: Record) -> Record:
    """A gate that is 1 by definition tells nothing of how far gates of equal models lie apart."""
    if config_of(record).model.ffn.complement != "ungated":
        return record
    return record | {"mechanism": {k: v for k, v in record["mechanism"].items() if not k.startswith("gate_")}}


def published_value(place: str | None, row: str, metric: str = "best") -> published.Value | None:
    """The paper's value at a place, where it has one."""
    found = [v for v in published.VALUES if (v.place, v.row, v.metric) == (place, row, metric)]
    return found[0] if found else None


def published_mean(place: str | None, row: str, metric: str = "best") -> float | None:
    found = published_value(place, row, metric)
    return None if found is None else found.mean


def published_gain(place: str | None, row: str, base: str = AFBO) -> float | None:
    """The paper's gain over a base at the same place, where it has both."""
    own, other = published_value(place, row), published_value(place, base)
    return published.difference(own, other) if own and other else None


def published_speed(row: str) -> float | None:
    """The paper's throughput as a share of its baseline's, by its table 1."""
    own, base = (published_mean("table 1", name, "images_per_s") for name in (row, AFBO))
    return own / base if own and base else None


def rank_points(of: Comparison) -> tuple[list[Point], list[Point]]:
    """Gain over AFBO+PR by rank: ours with the interval, the paper's with its ± (full from the sweep, which gives its
    own baseline; low-rank's one rank from table 1)."""
    ours, paper = [], []
    for (series, kind), rank in itertools.product((("OQC full", "full"), ("OQC-LR", "lowrank")), (16, 32, 48, 56, 64)):
        row = f"{DATA}_{kind}_r{rank}"
        found = of.gain(row)
        if found:
            ours.append(Point(series, rank, found.difference, found.low, found.high))
        point = published_point(series, rank, "rank sweep" if kind == "full" else "table 1", row)
        paper += [point] if point else []
    return ours, paper


def published_point(series: str, x: float, place: str, row: str) -> Point | None:
    """The paper's gain over AFBO+PR at the same place, with the ± of the row itself."""
    gain, value = published_gain(place, row), published_value(place, row)
    if gain is None or value is None:
        return None
    std = value.std
    return Point(series, x, gain, None if std is None else gain - std, None if std is None else gain + std)


def pareto_points(of: Comparison) -> tuple[list[Point], list[Point]]:
    """Gain over AFBO+PR against the share of its throughput."""
    ours, paper = [], []
    for series, row in COMPLEMENTS.items():
        found, speed, theirs = of.gain(row), of.speed(row), published_speed(row)
        if found and speed:
            ours.append(Point(series, speed, found.difference, found.low, found.high))
        point = published_point(series, theirs, "table 1", row) if theirs else None
        paper += [point] if point else []
    return ours, paper


def mechanism_values(of: Comparison) -> tuple[Values, Values]:
    """Metrics by series, ours and the paper's."""
    ours, paper = {}, {}
    for series, preset in MAIN.items():
        if preset in of.rows:
            ours[series] = of.rows[preset] | {"separation": of.rows[preset][SEPARATION]}
        found = [v for place in ("table 3", "mechanism text") for v in published.values(place, row=preset)]
        paper[series] = {value.metric: value.mean for value in found if value.metric != "best"}
    return ours, paper


def geometry_points(of: Comparison) -> list[Point]:
    """Effective rank and separation of every run of the mechanism's models."""
    series = {preset: name for name, preset in MAIN.items()}
    ours = [(series[record["preset"]], record["mechanism"]) for record in of.frozen if record["preset"] in series]
    found = [(name, metrics.get("effective_rank"), metrics.get(SEPARATION)) for name, metrics in ours]
    return [Point(name, x, y) for name, x, y in found if x is not None and y is not None]
