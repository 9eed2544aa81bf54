"""Numbers and tables as text: for pages in Markdown, and the table of runs for the terminal and HTML too."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

COLUMNS = ("Model", "Accuracy (%)", "Parameters", "Images/s", "Overlap before", "Overlap after")
FORMATS = {"best": ".2f", "effective_rank": ".2f", "participation_ratio": ".2f"}


def number(value: float | None, form: str = ".2f") -> str:
    """The value, or nothing where there is none."""
    return "" if value is None else format(value, form)


def spread(mean: float | None, std: float | None = None) -> str:
    return number(mean) + ("" if mean is None or std is None else f" ± {std:.2f}")


def beside(ours: str, paper: str, unit: str = "") -> str:
    """Ours, with the paper's in brackets where it has one."""
    parts = (ours and ours + unit, paper and f"({paper}{unit})")
    return " ".join(part for part in parts if part)


def signed(value: float | None, metric: str = "best") -> str:
    """A difference of a metric, with its sign and the digits that the metric deserves."""
    return number(value, "+" + form_of(metric))


def form_of(metric: str) -> str:
    return FORMATS.get(metric, ".4f" if metric.startswith("separation") else ".3f")


def bound(value: float, form: str) -> str:
    """With its sign, and another digit as long as it looks like 0 and is not."""
    text = f"{value:+{form}}"
    digits = int(form.strip(",.f") or 0)
    while value and not float(text.replace(",", "")) and digits < 8:
        digits += 1
        text = f"{value:+.{digits}f}"
    return text


def p_value(p: float) -> str:
    """With more digits where three would hide on which side of 0.05 it lies."""
    if p < 0.001:
        return "< 0.001"
    shown = (f"{p:.{digits}f}" for digits in range(3, 9))
    return next((text for text in shown if float(text) != 0.05), "0.050")


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def literal(text: str) -> str:
    """Free text within a line, shown as it is: on one line, and nothing in it is Markdown or HTML. An underscore within
    a word means nothing and stays."""
    return re.sub(r"[\\`*\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", " ".join(text.split()))


def markdown_table(columns: Sequence[str], body: Sequence[Sequence[str]], *, words: Collection[str] = ()) -> str:
    """The first column and those of `words` to the left, the others to the right; columns with nothing in them are left
    out."""
    kept = [k for k in range(len(columns)) if k == 0 or any(row[k] for row in body)]
    lines = [[columns[k] for k in kept], ["---" if k == 0 or columns[k] in words else "---:" for k in kept]]
    lines += [[row[k].replace("|", "\\|") or "–" for k in kept] for row in body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(rows: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """`COLUMNS`, and a line of them for each row of `records.rows`."""
    forms = {"images_per_s": ",.0f", "before": ".3f", "after": ".1e"}
    return COLUMNS, [
        [
            row["preset"],
            spread(row["mean"], row["std"]),
            f"{row['parameters']:,}",
            *(number(row[name], form) or "–" for name, form in forms.items()),
        ]
        for row in rows
    ]
