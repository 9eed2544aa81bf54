"""The folder of a run: what was asked (config), where it ran (environment), what came out (metrics, summary)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oqc import config as configs
from oqc.config import Data, Run
from oqc.data import Dataset
from oqc.files import PARTIAL, check_folder, locked, write_whole
from oqc.train import checkpoint
from oqc.train.summary import Row

_PARTIAL = re.compile(rf"((config|environment|summary)\.json|metrics\.jsonl){PARTIAL}")
INPUT = "input.json"  # what an export is known by
EXPORTS = {"onnx": "model.onnx", "torch-export": "model.pt2", "safetensors": "model.safetensors"}  # `oqc export --to`


class RunFolder:
    """`config.json`, `environment.json`, `metrics.jsonl`, `summary.json`, `checkpoints/` under one path, and `export/`
    where `oqc export` was asked for it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.exported = self.path / "export"

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").exists()

    def check(self, *, overwrite: bool = False) -> None:
        """Refuses a place that holds a run already, unless that may be overwritten, or something else."""
        self.check_writable()
        if (self.path / "config.json").exists():
            if not overwrite:
                state = "a finished" if self.finished else "an unfinished"
                way = (
                    "choose another folder"
                    if self.finished
                    else f"continue it with --resume {shlex.quote(str(self.path))}"
                )
                raise ValueError(f"{self.path} holds {state} run; {way}, or replace it with --overwrite")
        elif self.path.exists() and not _is_beginning(list(self.path.iterdir())):
            raise ValueError(f"{self.path} is not empty and holds no run; choose another folder")

    def check_writable(self) -> None:
        """Refuses a place that a run could not be kept in, before anything in it is touched."""
        for folder in (self.path, self.checkpoints):
            check_folder(f"{folder}, a run's place,", folder)

    def create(self, config: Run, environment: dict[str, Any], *, overwrite: bool = False) -> None:
        """Starts a new run here, in place of an old one where that is allowed, of which nothing stays but what was not
        written by us. An old one is unfinished first, and its config.json, by which a run is known, is replaced last: a
        kill in between leaves a run, or what `check` takes for none."""
        self.check(overwrite=overwrite)
        (self.path / "summary.json").unlink(missing_ok=True)
        checkpoint.clear(self.checkpoints)
        _drop_export(self.exported)
        (self.path / "metrics.jsonl").unlink(missing_ok=True)
        for path in (*self.path.glob("events.out.tfevents.*"), *filter(_is_partial, self.path.glob("*.tmp"))):
            path.unlink()
        self.write("environment.json", environment)
        self.write("config.json", configs.to_dict(config))

    def check_data(self, dataset: Dataset) -> None:
        """Refuses a data set that is not the one this run was trained on."""
        then = self.data().get("digest")
        if then != dataset.digest:
            raise ValueError(
                f"{self.path} was trained on other data: {dataset.name} has digest {dataset.digest[:12]} now, it had"
                f" {str(then)[:12]} then"
            )

    def move_data(self, data: Data) -> None:
        """Has an unfinished run look for its data where `data` has them, from now on; `check_data` goes before."""
        config = self.config()
        moved = dataclasses.replace(config, data=dataclasses.replace(config.data, name=data.name, root=data.root))
        if moved != config and not self.finished:
            self.check_writable()
            self.write("config.json", configs.to_dict(moved))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other processes from training here meanwhile."""
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path / ".lock", taken=f"another process is training in {self.path}"):
            yield

    def config(self) -> Run:
        found = self.read("config.json")
        try:
            return configs.from_dict(Run, found)
        except ValueError as error:
            raise ValueError(f"{self.path / 'config.json'}: {error}") from None

    def data(self) -> dict[str, Any]:
        """What environment.json tells of the data that the run was trained on."""
        environment = self.read("environment.json")
        found = environment.get("data") if isinstance(environment, dict) else None
        told = found if isinstance(found, dict) else {}
        missing = [name for name in ("mean", "std", "classes") if not isinstance(told.get(name), list)]
        if missing:
            where = self.path / "environment.json"
            raise ValueError(f"{where} does not tell the data of the run: it has no {', '.join(missing)} of it")
        return told

    def read(self, name: str) -> Any:
        path = self.path / name
        try:
            return json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            runs = sorted(str(config.parent) for config in self.path.glob("*/config.json"))
            inside = f"; runs in it: {', '.join(runs)}" if runs else ""
            raise ValueError(f"{self.path} is not the folder of a run: it has no {name}{inside}") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ValueError(f"{path} is damaged: it is not JSON") from None

    def write(self, name: str, content: Any) -> None:
        write_whole(self.path / name, (json.dumps(content, indent=2) + "\n").encode())

    def add_environment(self, environment: dict[str, Any]) -> None:
        """Where the run went on, beside where it started."""
        first = self.read("environment.json")
        self.write("environment.json", {**first, "resumed": [*first.get("resumed", []), environment]})

    def append(self, row: Row) -> None:
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    def rewrite_metrics(self, rows: list[Row]) -> None:
        """Takes the metrics back to a checkpoint's point."""
        write_whole(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


def seeds_in(folder: Path) -> list[Path]:
    """The runs in the folder of several seeds, one a seed (s0, s1, ...); none where it is a run itself."""
    if os.path.exists(folder / "config.json"):
        return []
    runs = [path.parent for path in folder.glob("s*/config.json") if path.parent.name[1:].isdecimal()]
    return sorted(runs, key=lambda run: int(run.name[1:]))


def is_export(folder: Path) -> bool:
    """Whether `oqc export` wrote here."""
    try:
        found = json.loads((folder / INPUT).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.keys() == {"shape", "range", "mean", "std", "classes"}


def _drop_export(folder: Path) -> None:
    """Removes an export, its mark last, and the folder where it holds nothing else."""
    if is_export(folder):
        for name in (*EXPORTS.values(), "oqc.json", INPUT):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _is_beginning(paths: list[Path]) -> bool:
    """Whether these are nothing, or what a kill leaves before there is a run."""
    left = {path.name for path in paths if not _is_partial(path)}
    return left <= {".lock"} or left == {".lock", "environment.json"}


def _is_partial(path: Path) -> bool:
    """Whether this is a file of ours that was not written to its end (`write_whole`)."""
    return bool(_PARTIAL.fullmatch(path.name)) and path.is_file()
