"""Figures from records, as SVG text. matplotlib is imported when a figure is drawn."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from oqc.report.records import Record

# Okabe and Ito's, which stay apart under every colour blindness; ink and grey in place of black and sky blue.
COLORS = ("#1b1f24", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#5f6b76")


def accuracy_over_epochs(records: Sequence[Record]) -> str:
    """Mean test accuracy by epoch, one line a preset, with the spread over its seeds as a band."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    presets = list(dict.fromkeys(record["preset"] for record in records))
    for place, preset in enumerate(presets):
        color = COLORS[place % len(COLORS)]
        curves = [record["per_epoch"] for record in records if record["preset"] == preset]
        epochs = [point["epoch"] for point in curves[0]]
        columns = list(zip(*([point["test"] for point in curve] for curve in curves), strict=True))
        axes.plot(epochs, [statistics.fmean(c) for c in columns], color=color, label=preset, linewidth=1.6)
        if len(curves) > 1:
            axes.fill_between(
                epochs, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.12, lw=0
            )
    low = min(statistics.fmean(p["test"] for p in r["per_epoch"][len(r["per_epoch"]) // 3 :]) for r in records)
    bottom = max(0.0, low - 6)  # what is learned in the first epochs would leave the rest a line
    axes.set_ylim(bottom, 100.5 if max(r["best"] for r in records) > 94 else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("Epoch")
    axes.set_ylabel(f"Test accuracy (%), from {bottom:.0f} on" if bottom else "Test accuracy (%)")
    plain(axes)
    axes.legend(frameon=False, loc="lower right")
    return svg(figure)


def throughput(rows: Sequence[dict[str, Any]], paper: Mapping[str, float], title: str) -> str:
    """Training throughput of each complement as a share of its host's, beside the paper's own share where there is one
    to compare with."""
    from matplotlib.figure import Figure

    train = [row for row in rows if row["phase"] == "train" and row["host"] == "afbo"]
    groups = list(dict.fromkeys((row["backend"], row["mode"]) for row in train))
    names = list(dict.fromkeys(row["complement"] for row in train if row["complement"] != "none"))
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / (len(groups) + 1)
    theirs = {name: paper[name] for name in names if name in paper}
    series = [("paper", theirs)] if theirs else []
    for backend, mode in groups:
        speed = {r["complement"]: r["images_per_s"] for r in train if (r["backend"], r["mode"]) == (backend, mode)}
        ratios = {n: speed[n] / speed["none"] for n in names if n in speed and "none" in speed}
        if ratios:
            series.append((f"ours, {backend}, {mode}: AFBO {speed['none']:,.0f} images/s", ratios))
    for i, (label, ratios) in enumerate(series):
        places = [names.index(name) + (i - (len(series) - 1) / 2) * width for name in ratios]
        color = COLORS[-1] if label == "paper" else COLORS[1 + i % (len(COLORS) - 2)]
        bars = axes.bar(places, list(ratios.values()), width, label=label, color=color)
        patch = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # over the line at 1
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2, bbox=patch)
    axes.axhline(1, color=COLORS[0], linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1.25)
    axes.set_ylabel("Throughput / AFBO alone")
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if series:
        axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    return svg(figure)


def plain(axes: Any) -> None:
    """The house style: a faint grid, two spines."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def svg(figure: Any) -> str:
    """The same figure gives the same bytes, under one version of matplotlib, which it names."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "oqc", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": f"matplotlib {matplotlib.__version__}"})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
