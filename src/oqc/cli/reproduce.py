"""`oqc reproduce`."""

from __future__ import annotations

import json
import os
import shlex
import signal
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from oqc.cli.demo import print_table
from oqc.cli.train import AsJson, Device
from oqc.experiments import suites
from oqc.experiments.job import Job
from oqc.report import Record, finished, rows
from oqc.report.markdown import plural
from oqc.report.provenance import NOT_RECORDED, commit_of, diverged_line, environment_line, machine_of
from oqc.train import Progress, Silent, Status, find_device
from oqc.train.environment import environment


def reproduce(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help=", ".join(suites.SUITES))],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each model: 0 to N - 1.")] = 3,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Start no run that would not end in this time; 0: tell what is left.")
    ] = None,
    data: Annotated[str, typer.Option(help=", ".join(suites.DATA) + " (small models, for a CPU)")] = "cifar100",
    data_dir: Annotated[Path | None, typer.Option(help="Where the data set's archive or folder lies.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Other epochs than the protocol's.")] = None,
    results: Annotated[Path | None, typer.Option(help="Folder of runs.jsonl. Default: results/<data>.")] = None,
    device: Device = None,
    shared_device: Annotated[
        bool,
        typer.Option("--shared-device", help="Other work uses the device too: leave the runs' speeds out of tables."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a suite of the paper: what its results file lacks. Stop it at any time; the same command goes on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # see `oqc train`
    folder = results or Path("results") / data
    console = Console(stderr=as_json, soft_wrap=True)
    shown = _Shown(console, f"{suite} on {data}", "models shrunk for a CPU" if data == "digits" else "")
    with shown.bar:
        found = suites.reproduce(
            suite,
            folder,
            seeds=seeds,
            data=data,
            data_dir=data_dir,
            epochs=epochs,
            minutes=minutes,
            device=device,
            watch=shown,
            shared=shared_device,
        )
    path = folder / suites.RESULTS
    if as_json:
        typer.echo(json.dumps({"suite": suite, "results": str(path), **_outcome(found)}))
    elif finished(found.records):
        print_table(found.records)
    earlier = [r for r in found.records if (r["preset"], r["seed"]) not in shown.ended]
    here = {"environment": environment(find_device(device))}
    versions = {commit_of(one) for one in (here, *earlier)} - {NOT_RECORDED}
    if any(machine_of(one) != machine_of(here) for one in earlier) or len(versions) > 1:
        where = f"{len(earlier)} of {plural(len(found.records), 'run')} stood in {path} before, made on"
        typer.echo(f"{where} {environment_line(earlier)}. For runs of your own alone: --results FOLDER", err=True)
    diverged = diverged_line(found.records)
    if diverged:
        typer.echo(f"{diverged} To run one again, take its line out of {path}", err=True)
    total = len(found.left) + len(found.records)
    note = f"{len(found.left)} of {total} runs are left; the same command goes on from {path}"
    if found.signal is not None:
        typer.echo(f"stopped by {signal.Signals(found.signal).name}; {note}", err=True)
        raise typer.Exit(128 + found.signal)
    what = "the table" if data == "digits" else "tables, claims and figures"
    shown.line(note if found.left else f"all in {path}; {what}: oqc report {shlex.quote(str(folder))}")


def _outcome(found: suites.Result) -> dict[str, object]:
    return {
        "rows": rows(found.records),
        "left": [{"preset": job.preset, "seed": job.seed} for job in found.left],
        "diverged": [
            {"preset": one["preset"], "seed": one["seed"], **one["diverged"]}
            for one in found.records
            if "diverged" in one
        ],
    }


class _Shown:
    """A bar over the whole suite on a terminal, and a line for each run that ends."""

    def __init__(self, console: Console, label: str, about: str) -> None:
        self.console, self.label, self.about, self.done, self.total = console, label, about, 0, 0
        self.ended: set[tuple[str, int]] = set()  # presets and seeds
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self.bar = Bar(*columns, console=console, disable=not console.is_terminal, transient=True)
        self.task = self.bar.add_task(label, total=None, text="")

    def begin(self, done: int, total: int, left: float | None) -> None:
        self.done, self.total = done, total
        self.bar.update(self.task, completed=done, total=total, text=_time(left))
        self.line(
            "  ".join(part for part in (f"{self.label}: {total} runs, {done} done", self.about, _time(left)) if part)
        )

    def run(self, job: Job) -> Progress:
        return _Epochs(self, job)

    def end(self, job: Job, found: Record, left: float | None) -> None:
        self.done += 1
        self.ended.add((job.preset, job.seed))
        self.bar.update(self.task, completed=self.done, text=_time(left))
        text = f"[{self.done}/{self.total}] {job}  "
        if "diverged" in found:
            text += f"diverged in epoch {found['diverged']['epoch']}"
        else:
            text += f"best {found['best']:.2f}  {found['images_per_s']:,.0f} images/s  {found['seconds']:.0f} s"
        self.line("  ".join(part for part in (text, _time(left)) if part))

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)


class _Epochs(Silent):
    """Shows on the bar where the run is."""

    def __init__(self, shown: _Shown, job: Job) -> None:
        self.shown, self.job = shown, job

    def status(self, status: Status) -> None:
        text = f"{self.job}  epoch {status.epoch}/{status.epochs}"
        self.shown.bar.update(self.shown.task, description=f"{self.shown.label}  {text}")

    def note(self, text: str) -> None:
        self.shown.line(text)


def _time(left: float | None) -> str:
    return f"{timedelta(seconds=round(left))} left" if left else ""
