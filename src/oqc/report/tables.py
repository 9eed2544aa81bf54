"""Rows as text: what the terminal table, the page and the Markdown tables have in their cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COLUMNS = ("Model", "Accuracy (%)", "Parameters", "Images/s", "Overlap before", "Overlap after")


def cells(row: dict[str, Any]) -> list[str]:
    spread = "" if row["std"] is None else f" ± {row['std']:.2f}"
    return [
        row["preset"],
        f"{row['mean']:.2f}{spread}",
        f"{row['parameters']:,}",
        _number(row["images_per_s"], ",.0f"),
        _number(row["before"], ".3f"),
        _number(row["after"], ".1e"),
    ]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def table(rows: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    return COLUMNS, [cells(row) for row in rows]
