"""`oqc demo`."""

from __future__ import annotations

import importlib.util
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from oqc.experiments import demo as experiment
from oqc.files import check_folder
from oqc.report import Record, rows, table
from oqc.report.markdown import plural
from oqc.train import RunFolder
from oqc.train.stopping import stop_on_signals


def demo(
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default: runs/demo, or the next free one.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each model.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs for each run.")] = experiment.EPOCHS,
) -> None:
    """Train AFBO+PR and its four complements on scikit-learn's digits, print a table and write a report."""
    need("the demo", "matplotlib", "scikit-learn", "jinja2")
    folder = _free_folder(out)
    console = Console()
    began, total = time.perf_counter(), len(experiment.VARIANTS) * seeds
    size = f"{plural(seeds, 'seed')} on digits, {plural(epochs, 'epoch')}"
    console.print(f"{len(experiment.VARIANTS)} models x {size} each, on the CPU")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    task = bar.add_task("training", total=total)
    done: list[Record] = []

    def end(record: Record) -> None:
        done.append(record)
        bar.update(task, completed=len(done))
        console.print(
            f"[{len(done)}/{total}] {record['preset']}, seed {record['seed']}: best test accuracy"
            f" {record['best']:.2f}, {record['images_per_s']:,.0f} images/s",
            markup=False,
            highlight=False,
        )

    with RunFolder(folder).held(), stop_on_signals() as stop, bar:
        records = experiment.run_demo(folder, seeds=range(seeds), epochs=epochs, on_end=end, stop=stop)
    if stop.signal is not None and len(records) < total:
        kept = f"{len(done)} of {total} runs are in {folder / experiment.RESULTS}" if done else "no run had ended"
        typer.echo(f"stopped by {signal.Signals(stop.signal).name}; {kept}", err=True)
        raise typer.Exit(128 + stop.signal)
    print_table(records)
    from oqc.report.page import write_page

    lead = (
        f"A small Deep-ViT with an AFBO host and penultimate-residual readout, alone and with each complement, on"
        f" scikit-learn's 8 x 8 digits: {plural(seeds, 'seed')}, {plural(epochs, 'epoch')}."
        " A demonstration of the method, not a measurement of it."
    )
    write_page(folder / "report.html", records, title="oqc demo", lead=lead)
    console.print(
        f"{time.perf_counter() - began:.0f} s; report: {folder / 'report.html'}", highlight=False, soft_wrap=True
    )


def print_table(records: list[Record]) -> None:
    """A row a preset, in the order of the records."""
    console = Console() if Console().is_terminal else Console(width=110)
    columns, body = table(rows(records))
    shown = Table(*columns)
    if console.width < 100:
        shown = Table(*(name.replace("Overlap ", "Overlap\n") for name in columns), box=box.SIMPLE_HEAD)
        shown.padding = (0, 0, 0, 1)
    shown.columns[0].overflow = "fold"  # a name is never cut short
    for column in shown.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for cells in body:
        shown.add_row(*cells)
    console.print(shown)


def need(what: str, *packages: str) -> None:
    modules = {"scikit-learn": "sklearn"}
    missing = [name for name in packages if importlib.util.find_spec(modules.get(name, name)) is None]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}: pip install {' '.join(missing)}")


def _free_folder(out: Path | None) -> Path:
    """Where nothing is yet. Of two demos that start at once each makes a folder of its own; where both were given the
    same one, the lock in it decides."""
    if out is not None:
        if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - {".lock"}):
            raise ValueError(f"--out {out} exists and is not an empty folder")
        check_folder("--out", out)
        return out
    runs = Path("runs")
    check_folder("runs", runs)
    runs.mkdir(exist_ok=True)
    number = 1
    while True:
        try:
            path = runs / (f"demo-{number}" if number > 1 else "demo")
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
