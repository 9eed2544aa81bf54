"""One self-contained HTML page from run records: no script, no file beside it, nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from oqc.files import write_whole
from oqc.report.figures import accuracy_over_epochs
from oqc.report.markdown import table
from oqc.report.records import Record, rows


def write_page(path: Path, records: Sequence[Record], *, title: str, lead: str) -> None:
    """Writes the page whole or not at all."""
    from jinja2 import Environment

    found = rows(records)
    columns, body = table(found)
    chances = sorted({f"{row['chance']:.3f}" for row in found if row["chance"] is not None})
    source = resources.files("oqc.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    text = (
        Environment(autoescape=True)
        .from_string(source)
        .render(
            title=title,
            lead=lead,
            columns=columns,
            rows=body,
            seeds=max(row["seeds"] for row in found),
            chance=" to ".join(dict.fromkeys((chances[0], chances[-1]))) if chances else None,
            figure=accuracy_over_epochs(records),
            environment={k: v for k, v in records[0]["environment"].items() if isinstance(v, (str, int, float))},
        )
    )
    write_whole(path, text)
