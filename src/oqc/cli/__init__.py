"""The `oqc` command: groups, and one way for every mistake to end (one line on stderr, exit code 2)."""

from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer

import oqc
from oqc.cli import analyze, bench, data, demo, export, models, predict, report, reproduce, train

START, TRAIN, DATA, MEASURE = "Start here", "Train and use", "Data", "Measure"

app = typer.Typer(
    name="oqc",
    help="Orthogonal Quadratic Complements for vision transformer feed-forward networks (arXiv 2604.09709).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(rich_help_panel=START)(demo.demo)
app.command(rich_help_panel=START)(models.models)
app.command(rich_help_panel=TRAIN)(train.train)
app.command(rich_help_panel=TRAIN)(train.evaluate)
app.command(rich_help_panel=TRAIN)(predict.predict)
app.command(rich_help_panel=TRAIN)(export.export)
app.command(rich_help_panel=MEASURE)(reproduce.reproduce)
app.command(rich_help_panel=MEASURE)(analyze.analyze)
app.command(rich_help_panel=MEASURE)(bench.bench)
app.command(rich_help_panel=MEASURE)(report.report)
app.add_typer(data.app, name="data", rich_help_panel=DATA)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"oqc {oqc.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    try:
        app()
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        if isinstance(error, BrokenPipeError):
            sys.exit(141)
        print(f"error: {str(error) or 'out of memory'}", file=sys.stderr)
        sys.exit(2)
