"""`oqc report`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from oqc.cli.demo import need
from oqc.experiments.results import FIGURES, results_page
from oqc.experiments.suites import RESULTS
from oqc.files import check_folder
from oqc.report import read_records
from oqc.train import RunFolder, seeds_in


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with a runs.jsonl: results/cifar100.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write. Default: FOLDER.")] = None,
) -> None:
    """Write the tables, claims and figures of recorded runs, beside the paper's, as Markdown and SVG."""
    need("the report", "matplotlib", "scipy")
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"FOLDER must be a folder with a {RESULTS}, got {folder}, which {what}")
    if not (folder / RESULTS).exists():
        _check_no_run(folder)
    records = read_records(folder / RESULTS)
    if not records:
        raise ValueError(f"{folder / RESULTS} has no records")
    check_folder("FOLDER" if out is None else "--out", (out or folder) / FIGURES)
    for path in results_page(records).write(out or folder):
        typer.echo(path)


def _check_no_run(folder: Path) -> None:
    """Raises where `oqc train` wrote, one run or several seeds, whose metrics another command tells."""
    runs = seeds_in(folder)
    run = runs[0] if runs else folder
    try:
        RunFolder(run).config()
    except ValueError:
        return
    what = f"holds runs of oqc train ({', '.join(one.name for one in runs)})" if runs else "is a run of oqc train"
    raise ValueError(
        f"{folder} {what} and has no {RESULTS}; see a run's metrics with: oqc analyze {shlex.quote(str(run))}"
    )
