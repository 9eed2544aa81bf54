"""`oqc report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oqc.cli.demo import need
from oqc.experiments.results import FIGURES, results_page
from oqc.experiments.suites import RESULTS
from oqc.files import check_folder
from oqc.report import read_records


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with a runs.jsonl: results/cifar100.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write. Default: FOLDER.")] = None,
) -> None:
    """Write the tables, claims and figures of recorded runs, beside the paper's, as Markdown and SVG."""
    need("the report", "matplotlib", "scipy")
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"FOLDER must be a folder with a {RESULTS}, got {folder}, which {what}")
    records = read_records(folder / RESULTS)
    if not records:
        raise ValueError(f"{folder / RESULTS} has no records")
    check_folder("FOLDER" if out is None else "--out", (out or folder) / FIGURES)
    for path in results_page(records).write(out or folder):
        typer.echo(path)
