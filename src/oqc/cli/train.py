"""`oqc train`, `oqc evaluate`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from oqc import config as configs
from oqc import ops
from oqc.config import Data, Run
from oqc.data import Dataset, load
from oqc.data.sources import KNOWN
from oqc.files import expanded
from oqc.models import create_model, model_config
from oqc.report.markdown import plural, spread
from oqc.train import (
    Display,
    Diverged,
    Evaluator,
    RunFolder,
    Silent,
    Stopped,
    Summary,
    Trainer,
    find_device,
    read_weights,
    seeds_in,
    train_many,
)
from oqc.train.distributed import joined, rank_and_world
from oqc.train.numerics import DTYPES, numerics
from oqc.train.recorder import need_tensorboard
from oqc.train.step import resolve_mode

AUGMENT = {"digits": ["data.crop=0", "data.flip=false"]}  # digits mean something else mirrored, and fill the image
SHAPES = {"digits": (8, 1, 10), "cifar10": (32, 3, 10), "cifar100": (32, 3, 100), "tiny-imagenet": (64, 3, 200)}

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:<number>. Default: the GPU if there is one.")]
Which = Annotated[str, typer.Option(help="Weights to use: last or best.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data set lies now, if it moved.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def train(
    preset: Annotated[str | None, typer.Option(help="A run of the paper by name; other options change it.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A model by name (oqc models). Default: the paper's AFBO+PR.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help=f"Data set by name, an image folder or an .npz file. Default: {Run().data.name}."),
    ] = None,
    root: Annotated[str | None, typer.Option(help="Where the data set's archive or folder lies.")] = None,
    val: Annotated[float | None, typer.Option(help="Share of the training part to hold out for choices.")] = None,
    host: Annotated[str | None, typer.Option(help=", ".join(configs.HOSTS))] = None,
    complement: Annotated[str | None, typer.Option(help=", ".join(configs.COMPLEMENTS))] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the complement.")] = None,
    epochs: Annotated[int | None, typer.Option(help=f"Default: the preset's, or {Run().train.epochs}.")] = None,
    batch: Annotated[
        int | None, typer.Option(help=f"Images per step, over all processes. Default: {Run().train.batch}.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help=f"Learning rate at its peak. Default: {Run().train.lr:g}.")] = None,
    mode: Annotated[str | None, typer.Option(help=", ".join(configs.MODES))] = None,
    precision: Annotated[str | None, typer.Option(help=", ".join(configs.PRECISIONS))] = None,
    backend: Annotated[str | None, typer.Option(help=", ".join(configs.BACKENDS))] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Any config field: train.ema=0.999")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="One run for each: 0,1,2. Default: the config's.")] = None,
    at_once: Annotated[str, typer.Option(help="Seeds to train at the same time on one GPU; auto measures.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder of the run; with several seeds, of their folders.")] = None,
    resume: Annotated[
        list[Path] | None, typer.Option(metavar="RUN", help="Continue an interrupted run, or those of its seeds.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="With --resume: where the data set lies now, if it moved.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a run that is in the folder.")] = False,
    device: Device = None,
    tensorboard: Annotated[bool, typer.Option(help="Write event files for TensorBoard too.")] = False,
    dry_run: Annotated[
        bool, typer.Option(help="Print the resolved config (of several seeds, a list) and stop.")
    ] = False,
) -> None:
    """Train a model; Ctrl-C saves and stops.

    Several GPUs: torchrun --nproc-per-node K -m oqc train ...
    """
    fields = {
        "data.name": data,
        "data.root": root,
        "data.val": val,
        "model.ffn.host": host,
        "model.ffn.complement": complement,
        "model.ffn.rank": rank,
        "train.epochs": epochs,
        "train.batch": batch,
        "train.lr": lr,
        "train.mode": mode,
        "train.precision": precision,
        "train.backend": backend,
    }
    changes = [f"{field}={value}" for field, value in fields.items() if value is not None] + (settings or [])
    named = {change.partition("=")[0].strip() for change in changes}
    if resume:
        if preset or model or changes or seeds or out or overwrite or dry_run:
            raise ValueError(
                "--resume continues a run with its own config; give no other options that change it (to train longer,"
                " start a run with more --epochs: the learning rate falls over all of them; for data that were moved,"
                " give --data-dir)"
            )
        runs = {path: config_of(path, data_dir) for given in resume for path in _unfinished(given)}
    else:
        if data_dir is not None:
            raise ValueError(
                f"--data-dir {data_dir} is for --resume; a new run takes --data for your own images and --root for the"
                " archive or folder of a known set"
            )
        if preset and model:
            raise ValueError(f"--preset {preset} and --model {model} both name a model: give one of them")
        run = resolve(preset, model, changes)
        if rank is not None and run.model.ffn.complement == "none":
            raise ValueError(f"--rank {rank} is that of a complement, and this model has none: give --complement too")
        if seeds is not None and "train.seed" in named:
            raise ValueError(f"--seeds {seeds} and --set train.seed={run.train.seed} both name seeds: give one of them")
        name = _name(run, preset, model)
        numbers = _seeds(seeds) if seeds is not None else [run.train.seed]
        each = [configs.override(run, [f"train.seed={number}"]) for number in numbers]
        runs = {_place(out, name, one, several=len(each) > 1): one for one in each}
        if dry_run:
            resolved = [configs.to_dict(one) for one in each]
            typer.echo(json.dumps(resolved if len(resolved) > 1 else resolved[0], indent=2))
            return
        for path in runs:
            RunFolder(path).check(overwrite=overwrite)
    if at_once != "auto" and not (at_once.isdecimal() and int(at_once)):
        raise ValueError(f"--at-once must be auto or a number from 1 on, got {at_once!r}")
    if tensorboard:
        need_tensorboard()
    # What cuBLAS takes on recent GPUs anyway; PyTorch wants it said before it calls results repeatable.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    find_device(device)  # before the processes wait for each other
    with joined(device) as own:
        rank, world = rank_and_world()
        for run in runs.values():  # what stands against it shows before any data is read
            resolve_mode(run.train.mode, find_device(own), world)
        options = {"device": own, "resume": bool(resume), "overwrite": overwrite, "tensorboard": tensorboard}
        console = Console(quiet=rank > 0, soft_wrap=True)
        if "train.warmup" in named and (warmup := run.train.warmup) > (half := run.train.epochs / 2):
            console.print(
                f"train.warmup {warmup:g} is more than half of the epochs: it takes {half:g}", highlight=False
            )
        _run(runs, at_once if world == 1 else "1", console, options)


def _run(runs: dict[Path, Run], at_once: str, console: Console, options: dict[str, Any]) -> None:
    """Trains, shows, and turns what ends a run early into a message and an exit code."""
    datasets: dict[Data, Dataset] = {}
    make: list[Callable[[], Trainer]] = []
    try:
        with Display(console).shown() as display:
            for path, run in runs.items():
                if run.data not in datasets:
                    datasets[run.data] = load(run.data)
                    console.print(_about(datasets[run.data]), highlight=False, markup=False)
                if options["resume"]:
                    RunFolder(path).check_data(datasets[run.data])
                make.append(partial(_trainer, run, datasets[run.data], path, display, options))
            if options["resume"]:
                for path, run in runs.items():  # of all or of none, and before any goes on
                    RunFolder(path).move_data(run.data)
            summaries = train_many(make, at_once if at_once == "auto" else int(at_once))
    except (Stopped, Diverged) as end:
        for number, found in sorted(end.outcomes.items()):
            if isinstance(found, Summary):
                console.print(_line(list(runs)[number], found), highlight=False, markup=False)
        reasons = [str(found) for found in end.outcomes.values() if isinstance(found, Diverged)]
        if not console.quiet:
            told = [_way_on(runs, end, resume=options["resume"])] if isinstance(end, Stopped) else []
            typer.echo("\n".join([*reasons, *told]), err=True)
        raise typer.Exit(128 + end.signal if isinstance(end, Stopped) else 1) from None
    for path, summary in zip(runs, summaries, strict=True):
        console.print(_line(path, summary), highlight=False, markup=False)
    alike = {dataclasses.replace(run, train=dataclasses.replace(run.train, seed=0)) for run in runs.values()}
    if len(summaries) > 1 and len(alike) == 1:
        best, final = ([getattr(one, name) for one in summaries] for name in ("best", "final"))
        means = ", ".join(
            f"{name} {spread(statistics.fmean(values), statistics.stdev(values))}"
            for name, values in (("best", best), ("final", final))
        )
        console.print(f"{plural(len(summaries), 'run')}, mean ± std: {means}", highlight=False, markup=False)


def _trainer(run: Run, dataset: Dataset, path: Path, display: Display, options: dict[str, Any]) -> Trainer:
    return Trainer(
        create_model(run.model, seed=run.train.seed, backend=run.train.backend),
        dataset,
        run,
        path,
        progress=Silent() if display.console.quiet else display.run(f"seed {run.train.seed}"),
        notes={
            "backend": ops.what_runs(run.train.backend, find_device(options["device"])),
            "attention": ops.attention_in_use(
                tokens=(run.model.image_size // run.model.patch_size) ** 2,
                size=run.model.width // run.model.heads,
                half=run.train.precision == "bf16",
                backend=run.train.backend,
                device=find_device(options["device"]),
            ),
        },
        **options,
    )


def resolve(preset: str | None, model: str | None, changes: list[str]) -> Run:
    """The config that a preset or a model, options and settings describe; the model's ends fit the data set."""
    run = Run()
    if preset is not None:
        from oqc.experiments import presets

        run = presets.get(preset)
    if model is not None:
        run = dataclasses.replace(run, model=model_config(model))
    data = configs.override(run, [change for change in changes if change.strip().startswith("data.")]).data
    size, channels, classes = _shape(data)
    ends = [f"model.image_size={size}", f"model.channels={channels}", f"model.num_classes={classes}"]
    if preset is None or data.name != run.data.name:
        ends += AUGMENT.get(data.name, [])
    place = "data.root" if data.root is not None else "data.name" if data.name not in SHAPES else None
    if place is not None:  # found again from any folder
        changes = [*changes, f"{place}={expanded(place, data.root or data.name).absolute()}"]
    run = configs.override(run, ends + changes)
    if (given := run.model.image_size) != size:
        raise ValueError(
            f"model.image_size must be {size}, as the images of {data.name} are, got {given};"
            f" --set data.image_size={given} resizes them"
        )
    for name in ("crop", "cutout"):
        if (blank := getattr(run.data, name)) > size:  # most of what is trained on would be
            raise ValueError(f"data.{name} must be at most the side of the images, {size}, got {blank}")
    if run.train.seed < 0:
        raise ValueError(f"train.seed must be 0 or more, got {run.train.seed}")
    create_model(run.model, backend=run.train.backend, device="meta")  # every mistake shows before anything starts
    return run


def _shape(data: Data) -> tuple[int, int, int]:
    """Image size, channels and classes; known sets are not opened for it."""
    if data.name in SHAPES:
        size, channels, classes = SHAPES[data.name]
        return data.image_size or size, channels, classes
    dataset = load(data)
    _, channels, height, width = dataset.train.images.shape
    if height != width:
        raise ValueError(f"{data.name} has images of {width}x{height}; make them square with --set data.image_size=N")
    return height, channels, len(dataset.classes)


def _seeds(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds must be whole numbers with commas between them, got {text!r}") from None
    if min(numbers) < 0:
        raise ValueError(f"--seeds must be 0 or more, got {text!r}")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"--seeds must differ, got {text!r}")
    return numbers


def _name(run: Run, preset: str | None, model: str | None) -> str:
    """That of the preset or model, while the run has its network."""
    from oqc.experiments import presets

    ffn = run.model.ffn
    named = presets.get(preset).model if preset else model_config(model) if model else None
    if named is not None and named.ffn == ffn:
        return str(preset or model)
    branch = "" if ffn.complement == "none" else f"-{ffn.complement}-r{ffn.rank}"
    return f"{Path(run.data.name).stem}-{ffn.host}{branch}"


def _place(out: Path | None, name: str, run: Run, *, several: bool) -> Path:
    if out is not None:
        return out / f"s{run.train.seed}" if several or seeds_in(out) else out
    return Path("runs") / f"{name}-{configs.content_hash(run)}-s{run.train.seed}"


def _unfinished(path: Path) -> list[Path]:
    """The run itself, or what is left to do of the runs in the folder of several seeds."""
    runs = seeds_in(path)
    left = [run for run in runs if not RunFolder(run).finished]
    if runs and not left:
        raise ValueError(f"--resume {path}: its {plural(len(runs), 'run')} are finished; there is nothing to resume")
    return left or [path]


def _way_on(runs: dict[Path, Run], end: Stopped, *, resume: bool) -> str:
    """What a signal ended, and how to start those of several runs that it came before."""
    left = [list(runs.items())[number] for number in end.unstarted]
    if not left or len(runs) == 1:
        return str(end)
    if resume:
        commands = " ".join(f"--resume {shlex.quote(str(path))}" for path, _ in left)
        return f"{end}: oqc train {commands}"
    return f"{end}: give the same command with --seeds {','.join(str(run.train.seed) for _, run in left)}"


def _about(data: Dataset) -> str:
    """What a run is trained on, in a line."""
    parts = {"training": data.train, "validation": data.val, "test": data.test}
    *counts, last = [f"{len(part):,} {name}" for name, part in parts.items() if part is not None]
    size = " x ".join(map(str, data.train.images.shape[1:]))
    return f"{data.name}: {', '.join(counts)} and {last} images of {len(data.classes)} classes, {size}"


def _line(path: Path, summary: Summary) -> str:
    chosen = "" if summary.at_best_val is None else f", at best validation {summary.at_best_val:.2f}"
    return (
        f"{path}: best {summary.best:.2f}, final {summary.final:.2f}{chosen}; {summary.parameters / 1e6:.2f} M"
        f" parameters, {summary.images_per_s:,.0f} images/s, {summary.non_finite} non-finite steps"
    )


def evaluate(
    run: Folder,
    split: Annotated[str, typer.Option(help="test or val.")] = "test",
    checkpoint: Which = "last",
    data_dir: DataDir = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Accuracy of a run's weights on a split of its data set."""
    configs.check_choice("split", split, ("test", "val"))
    config, own = config_of(run, data_dir), find_device(device)
    model, step = load_model(run, config, checkpoint, own)
    dataset = load(config.data)
    RunFolder(run).check_data(dataset)
    part = dataset.test if split == "test" else dataset.val
    if part is None:
        raise ValueError(f"{run} was trained without a validation part (data.val is 0)")
    train = config.train
    evaluator = Evaluator(model, part, dataset, own, precision=train.precision, batch=train.batch)
    with numerics(tf32=train.tf32, deterministic=train.deterministic):
        accuracy = evaluator.start().item()
    if as_json:
        about = {"run": str(run), "split": split, "checkpoint": checkpoint, "step": step}
        typer.echo(json.dumps(about | {"images": len(part), "accuracy": accuracy}))
    else:
        typer.echo(f"{accuracy:.2f}% of {len(part)} {split} images ({checkpoint} weights, step {step})")


def config_of(run: Path, data_dir: Path | None) -> Run:
    """The config of a run, with its data set where it lies now: `data_dir` itself or in it."""
    config = RunFolder(run).config()
    if data_dir is None:
        place = Path(config.data.root or "", "" if config.data.name in KNOWN else config.data.name)
        if place.is_absolute() and not place.exists():
            raise ValueError(f"data {place} does not exist; if it was moved, give --data-dir with its place now")
        return config
    if not data_dir.exists():
        raise ValueError(f"--data-dir {data_dir} does not exist")
    then = Path(config.data.name)
    if not then.is_absolute():
        return dataclasses.replace(config, data=dataclasses.replace(config.data, root=str(data_dir.absolute())))
    now = data_dir / then.name if (data_dir / then.name).exists() else data_dir
    if then.suffix == ".npz" and not now.is_file():
        raise ValueError(f"--data-dir must be {then.name} or the folder it is in, got {data_dir}")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, name=str(now.absolute())))


def load_model(run: Path, config: Run, checkpoint: str, device: torch.device) -> tuple[torch.nn.Module, int]:
    """The model of a run's checkpoint, on the device and ready to evaluate, and the step of its weights. Damaged ones
    passed over are told."""
    model = create_model(config.model, seed=config.train.seed, backend=config.train.backend)
    weights, step, warned = read_weights(run, checkpoint)
    for text in warned:
        typer.echo(text, err=True)
    model.load_state_dict(weights)
    return model.to(device, DTYPES[config.train.precision]).eval(), step
