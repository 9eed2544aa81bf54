"""One self-contained HTML page from run records: no script, no file beside it, nothing from the network."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from oqc.report.figures import accuracy_over_epochs
from oqc.report.records import Record, rows
from oqc.report.tables import table


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
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(partial, 0o644)
    os.replace(partial, path)
