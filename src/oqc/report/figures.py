"""Figures from records, as SVG text. matplotlib is imported here, and nowhere else at import time."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from typing import Any

from oqc.report.records import Record

COLORS = ("#1b1f24", "#c4520a", "#0b62a4", "#2e7d32", "#7b3fa0", "#a8761b", "#5f6b76")


def accuracy_over_epochs(records: Sequence[Record]) -> str:
    """Mean test accuracy by epoch, one line a preset, with the spread over its seeds as a band."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.subplots()
    presets = list(dict.fromkeys(record["preset"] for record in records))
    for color, preset in zip(_cycle(COLORS, len(presets)), presets, strict=True):
        curves = [record["per_epoch"] for record in records if record["preset"] == preset]
        epochs = [point["epoch"] for point in curves[0]]
        columns = list(zip(*([point["test"] for point in curve] for curve in curves), strict=True))
        axes.plot(epochs, [statistics.fmean(c) for c in columns], color=color, label=preset, linewidth=1.6)
        if len(curves) > 1:
            axes.fill_between(
                epochs, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.12, lw=0
            )
    low = min(statistics.fmean(p["test"] for p in r["per_epoch"][len(r["per_epoch"]) // 3 :]) for r in records)
    axes.set_ylim(max(0.0, low - 6), 100.5 if max(r["best"] for r in records) > 94 else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("Epoch")
    axes.set_ylabel("Test accuracy (%)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    with matplotlib.rc_context({"svg.hashsalt": "oqc", "svg.fonttype": "path"}):
        return _svg(figure)


def _cycle(values: Sequence[str], length: int) -> list[str]:
    return [values[i % len(values)] for i in range(length)]


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
