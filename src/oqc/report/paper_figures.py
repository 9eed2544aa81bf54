"""The paper's figures redrawn, ours over theirs: ours filled, with 95% intervals; the paper's hollow.

Accuracies are gains over AFBO+PR by the same protocol, so that two schedules can share an axis. A series has a marker
of its own beside its colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oqc.report.figures import COLORS, plain, svg
from oqc.report.statistics import SETTLED, Finding

INK, GREY = COLORS[0], COLORS[-1]
SERIES = {
    "AFBO+PR": COLORS[0],
    "OQC full": COLORS[1],
    "OQC-LR": COLORS[2],
    "OQC-static": COLORS[3],
    "OQC-dynamic": COLORS[4],
}
MARKERS = dict(zip(SERIES, "os^Dv", strict=True))
VERDICT_COLORS = {"reproduced": COLORS[2], "same sign": GREY, "other sign": GREY, "contradicted": COLORS[1]}
LARGE = 8  # the marker of what stands after Holm's correction
FILLED: dict[str, Any] = {"linestyle": "none", "markersize": 7}
HOLLOW: dict[str, Any] = FILLED | {"markerfacecolor": "white", "markeredgewidth": 1.3}


@dataclass(frozen=True)
class Point:
    """A value of a series, with its interval where it has one."""

    series: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


def forest(sections: Mapping[str, Sequence[Finding]]) -> str:
    """Every claim's difference with its interval, turned so that the side it names is on the right."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    lines = sum(len(findings) + 1 for findings in sections.values())
    figure = Figure(figsize=(7.6, 1.3 + 0.23 * lines), layout="constrained")
    axes = figure.subplots()
    places, names, y = [], [], 0.0
    for title, findings in sections.items():
        axes.text(-0.01, y, title, transform=axes.get_yaxis_transform(), ha="right", va="center", weight="bold", size=9)
        for found in findings:
            y -= 1
            side, color = found.claim.side, VERDICT_COLORS[found.verdict]
            axes.plot([side * found.low, side * found.high], [y, y], color=color, linewidth=1.8)
            filled = found.verdict in ("reproduced", "contradicted")
            size = LARGE if found.p_holm < SETTLED else 5
            axes.plot(side * found.difference, y, "o", color=color, markersize=size, mfc=color if filled else "white")
            if found.claim.published is not None:
                axes.plot(side * found.claim.published, y, "D", color=INK, markersize=5, mfc="none", mew=1)
            places.append(y)
            names.append(found.claim.name + (", 1 seed" if len(found.seeds) == 1 else ""))
        y -= 1
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(places, names, fontsize=8.5)
    axes.set_ylim(y + 0.3, 0.7)
    axes.set_xlabel("Difference in the claim's direction, points of test accuracy")
    plain(axes)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    handles = [
        Line2D([], [], color=COLORS[2], marker="o", markersize=5, label="reproduced, confirmed"),
        Line2D([], [], color=GREY, marker="o", markersize=5, mfc="white", label="interval contains 0"),
        Line2D([], [], color=COLORS[1], marker="o", markersize=5, label="contradicted, refuted"),
        Line2D([], [], color=INK, marker="o", markersize=LARGE, linestyle="none", label="large: after Holm too"),
        Line2D([], [], color=INK, marker="D", markersize=5, mfc="none", linestyle="none", label="published"),
    ]
    figure.legend(handles=handles, frameon=False, fontsize=8.5, loc="outside upper center", ncols=3)
    return svg(figure)


def rank_sweep(ours: Sequence[Point], paper: Sequence[Point]) -> str:
    """Gain by rank, one line a complement."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(point.series for point in (*ours, *paper)))
    axes.axhline(0, color=INK, linewidth=0.8)
    for k, series in enumerate(names):
        # Points of one rank stand side by side around it.
        mine = [replace(p, x=p.x + 0.8 * k - 1.2) for p in ours if p.series == series]
        theirs = [replace(p, x=p.x + 0.8 * k + 0.4) for p in paper if p.series == series]
        axes.plot([p.x for p in mine], [p.y for p in mine], color=SERIES[series], linewidth=1.2)
        _points(axes, mine, hollow=False)
        _points(axes, theirs, hollow=True)
    axes.set_xticks(sorted({point.x for point in (*ours, *paper)}))
    axes.set_xlabel("Rank")
    axes.set_ylabel("Gain over AFBO+PR (points)")
    plain(axes)
    _legend(figure, names)
    return svg(figure)


def pareto(ours: Sequence[Point], paper: Sequence[Point]) -> str:
    """Gain against training throughput, AFBO+PR at (1, 0)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    base = next(iter(SERIES))
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.axvline(1, color=INK, linewidth=0.8)
    _points(axes, [Point(base, 1, 0), *ours], hollow=False)
    _points(axes, paper, hollow=True)
    axes.set_xlabel("Training throughput / AFBO+PR's")
    axes.set_ylabel("Gain over AFBO+PR (points)")
    plain(axes)
    _legend(figure, dict.fromkeys([base, *(point.series for point in (*ours, *paper))]))
    return svg(figure)


Values = Mapping[str, Mapping[str, float | None]]  # series -> metric (docs/metrics.md) -> value


def mechanism(ours: Values, paper: Values, runs: Sequence[Point]) -> str:
    """(a) overlap before and after the projection, (b) effective rank against separation, ours and the paper's in a
    panel each since their scales differ, with each of our `runs` in ours, (c) the gate's mean and spread."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8.6, 7.4), layout="constrained")
    layout: Any = [["before", "ours"], ["before", "ours"], ["after", "ours"], *[["gate_mean", "paper"]] * 3]
    axes = figure.subplot_mosaic(layout)
    names = [name for name in SERIES if ours.get(name, {}).get("gate_mean") is not None]
    for metric in ("before", "after", "gate_mean"):
        for rows, shift, hollow in ((ours, -0.14, False), (paper, 0.14, True)):
            for place, name in enumerate(names):
                y, std = rows.get(name, {}).get(metric), rows.get(name, {}).get("gate_std")
                if y is None:
                    continue
                point = Point(name, place + shift, y)
                if metric == "gate_mean" and std is not None:
                    point = replace(point, low=max(0.0, y - std), high=y + std)
                _points(axes[metric], [point], hollow=hollow)
        axes[metric].set_xticks(range(len(names)), [name.removeprefix("OQC").lstrip(" -") for name in names])
        axes[metric].set_xlim(-0.6, len(names) - 0.4)
    for place, name in enumerate(names):
        chance = ours[name].get("chance")
        if chance is not None:
            axes["before"].plot([place - 0.38, place + 0.38], [chance] * 2, color=GREY, linewidth=1.2, linestyle="--")
    for metric, label in (("before", "Before"), ("gate_mean", "Gate: mean ± spread")):
        axes[metric].set_ylim(0, 1.05 * axes[metric].get_ylim()[1])
        axes[metric].set_ylabel(label)
    axes["before"].tick_params(axis="x", labelbottom=False)
    _decades(axes["after"])
    axes["after"].set_ylabel("After")
    axes["before"].set_title("(a) Overlap of branch and host; dashed: chance", fontsize=10, loc="left")
    axes["gate_mean"].set_title("(c) Gate use over tokens and blocks", fontsize=10, loc="left")
    for run in runs:
        axes["ours"].plot(run.x, run.y, MARKERS[run.series], color=SERIES[run.series], markersize=4, alpha=0.5, mew=0)
    for whose, rows in (("ours", ours), ("paper", paper)):
        for name, row in rows.items():
            x, y = row.get("effective_rank"), row.get("separation")
            if x is not None and y is not None:
                _points(axes[whose], [Point(name, x, y)], hollow=whose == "paper")
        axes[whose].set(xlabel="Effective rank", ylabel="Separation")
        axes[whose].margins(0.15)
        axes[whose].xaxis.set_major_locator(MaxNLocator(5))
        what = "ours (small: each run)" if whose == "ours" else "the paper's"
        axes[whose].set_title(f"(b) Geometry, {what}", fontsize=10, loc="left")
    for one in axes.values():
        plain(one)
    _legend(figure, [name for name in SERIES if name in ours or name in paper])
    return svg(figure)


def _decades(axes: Any) -> None:
    """A logarithmic axis of whole powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    shown = [float(y) for line in axes.lines for y in line.get_ydata() if y > 0]
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    if shown:
        low, high = math.log10(min(shown)), math.log10(max(shown))
        axes.set_ylim(10.0 ** math.floor(low - 0.15), 10.0 ** math.ceil(high + 0.15))  # no marker at the edge


def _points(axes: Any, points: Sequence[Point], *, hollow: bool) -> None:
    """Markers with their intervals behind them; hollow are the paper's."""
    for point in points:
        color = SERIES[point.series]
        if point.low is not None and point.high is not None:
            width = 0.9 if hollow else 1.6
            axes.plot([point.x] * 2, [point.low, point.high], color=color, linewidth=width, zorder=1.5)
        axes.plot(point.x, point.y, MARKERS[point.series], color=color, **(HOLLOW if hollow else FILLED))


def _legend(figure: Any, names: Iterable[str]) -> None:
    """The series, then which marker is whose."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=SERIES[name], marker=MARKERS[name], label=name, **FILLED) for name in names]
    handles += [Line2D([], [], color=GREY, marker="o", label="ours", **FILLED)]
    handles += [Line2D([], [], color=GREY, marker="o", label="paper", **HOLLOW)]
    figure.legend(
        handles=handles, frameon=False, fontsize=8.5, loc="outside upper center", ncols=len(handles), columnspacing=1.2
    )
