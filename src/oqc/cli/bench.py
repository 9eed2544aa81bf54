"""`oqc bench`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from oqc import config as configs
from oqc import ops
from oqc.experiments import bench as experiment
from oqc.experiments.comparison import published_speed
from oqc.files import check_folder, write_whole
from oqc.models.registry import MAIN, RANKS
from oqc.report.figures import throughput
from oqc.train import find_device
from oqc.train.environment import environment

CHOICES = {
    "hosts": configs.HOSTS,
    "complements": configs.COMPLEMENTS,
    "backends": configs.BACKENDS[1:],
    "modes": configs.MODES[1:],
    "phases": ("train", "inference"),
}


def bench(
    hosts: Annotated[str, typer.Option(help="With commas: " + ", ".join(configs.HOSTS))] = "afbo",
    complements: Annotated[str, typer.Option(help="With commas.")] = "none,full,lowrank,static,dynamic",
    backends: Annotated[str | None, typer.Option(help="With commas. Default: the fastest that runs here.")] = None,
    modes: Annotated[str | None, typer.Option(help="eager, compiled, graph. Default: graph, on a CPU eager.")] = None,
    phases: Annotated[str, typer.Option(help="train, inference.")] = "train,inference",
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:COMPLEMENT:BACKEND:MODE:PHASE", help="One more case; may be repeated."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1)] = 512,
    precision: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    repeats: Annotated[int, typer.Option(min=5, help="Rounds over all cases.")] = 7,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="A field of the model: depth=2")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the rows to this JSON file, and a figure beside it.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
) -> None:
    """Measure training and inference throughput of models side by side."""
    own = find_device(device)
    cuda = own.type == "cuda"
    configs.check_choice("precision", precision, experiment.PARITY)
    base = configs.override(configs.Model(), settings or [])
    named = {setting.partition("=")[0].strip() for setting in settings or []}
    for field, option in (("ffn.host", "--hosts"), ("ffn.complement", "--complements")):
        if field in named:
            raise ValueError(f"--set {field}: name it with {option}")
    rank = base.ffn.rank if "ffn.rank" in named else None
    configs.check_positive("num_classes", base.num_classes)  # 0, for features only, has nothing to train
    given = (
        hosts,
        complements,
        backends or ops.what_runs("auto", own),
        modes or ("graph" if cuda else "eager"),
        phases,
    )
    lists = [_split(name, text, CHOICES[name]) for name, text in zip(CHOICES, given, strict=True)]
    todo = experiment.cases(*lists, base=base, rank=rank)
    for text in case or []:
        parts = text.split(":")
        if len(parts) != 5:
            raise ValueError(f"--case must be HOST:COMPLEMENT:BACKEND:MODE:PHASE, got {text!r}")
        for (name, allowed), part in zip(CHOICES.items(), parts, strict=True):
            configs.check_choice(name, part, allowed)
        todo += experiment.cases(*([part] for part in parts), base=base, rank=rank)
    ran = [dataclasses.replace(one, backend=ops.what_runs(one.backend, own)) for one in todo]
    todo = list(dict.fromkeys(ran))  # each once, under the name of what runs here
    if not cuda and any(one.mode == "graph" for one in todo):
        raise ValueError(f"modes: graph needs a CUDA device, got device {own}; use eager or compiled")
    if out is not None:
        check_folder(f"--out {out}: its place", out.parent)
        if out.exists():
            raise ValueError(f"--out {out} exists; name a new file")
        if out.suffix not in (".json", ".svg"):
            raise ValueError(f"--out must be a .json file, got {out}")
        figure = out.with_suffix(".svg")
        if figure == out or figure.exists():
            what = "would have this name; name a .json file" if figure == out else "exists; name a new file"
            raise ValueError(f"--out {out}: the figure beside it, {figure}, {what}")
    console = Console(stderr=True)
    console.print(f"{len(todo)} cases, batch {batch}, {precision}, on {own}", highlight=False)
    rows = experiment.run_bench(
        todo,
        device=own,
        batch=batch,
        precision=precision,
        repeats=repeats,
        on_ready=lambda case: console.print("ready:", *map(str, case.row().values()), highlight=False),
    )
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        Console(width=None if Console().is_terminal else 130).print(_table(rows))
    if out is not None:
        write_whole(out, json.dumps({"environment": environment(own), "rows": rows}, indent=1) + "\n")
        if importlib.util.find_spec("matplotlib"):
            found = {name: published_speed(f"cifar100_{name}_r{RANKS[name]}") for name in MAIN}
            same = base == configs.Model()  # otherwise the paper has nothing to set beside it
            paper = {name: share for name, share in found.items() if share and same}
            where = environment(own).get("gpu", "CPU")
            write_whole(figure, throughput(rows, paper, f"Training on {where}, batch {batch}, {precision}"))


def _split(name: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    values = [part.strip() for part in text.split(",")]
    for value in values:
        configs.check_choice(name, value, allowed)
    return values


def _table(rows: list[dict[str, Any]]) -> Table:
    names = ("Host", "Complement", "Backend", "Mode", "Phase", "Images/s", "p20", "p80", "Busy ms", "Memory", "Floor")
    table = Table(*names, box=None)
    for column in table.columns[5:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row["host"],
            row["complement"] if row["rank"] is None else f"{row['complement']} R {row['rank']}",
            row["backend"],
            row["mode"],
            row["phase"],
            *(f"{row[name]:,.0f}" for name in ("images_per_s", "p20", "p80")),
            "–" if row["gpu_busy_ms"] is None else f"{row['gpu_busy_ms']:.2f}",
            "–" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 2**20:,.0f} MiB",
            "–" if row["floor_share"] is None else f"{100 * row['floor_share']:.0f}%",
        )
    return table
