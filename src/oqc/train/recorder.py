"""Keeps a run on disk: opens its folder, logs evaluations, saves and loads checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from oqc import config as configs
from oqc.config import Run
from oqc.train import checkpoint
from oqc.train.folder import Row, RunFolder


class Recorder:
    """Does nothing where `folder` is None: a run without a folder, or a rank other than the first."""

    def __init__(
        self, folder: RunFolder | None, config: Run, *, newest: list[str] | None = None, tensorboard: bool = False
    ) -> None:
        """`newest`: of a run to resume, the name of its newest checkpoint when it was loaded (`newest_of`)."""
        self.folder, self.config, self.tensorboard, self._newest = folder, config, tensorboard, newest
        self._writer = checkpoint.Writer(folder.checkpoints) if folder else None
        self._board: Any = None
        self._lock = contextlib.ExitStack()

    def start(self, environment: dict[str, Any], history: list[Row], *, resumed: bool, overwrite: bool) -> None:
        if self.folder is None:
            return
        self._lock.enter_context(self.folder.held())
        if not resumed:
            self.folder.create(self.config, environment, overwrite=overwrite)
        else:
            if self.folder.finished or newest_of(self.folder) != self._newest:
                raise ValueError(f"another process has gone on with {self.folder.path} meanwhile; look at it again")
            self.folder.add_environment(environment)
        self.folder.rewrite_metrics(history)
        if self.tensorboard:
            self._board = _tensorboard(self.folder.path, history[-1]["step"] + 1 if history else 0)

    def evaluated(self, row: Row) -> None:
        if self.folder is not None:
            self.folder.append(row)
        if self._board is not None:
            for name, value in row.items():
                if value is not None:
                    self._board.add_scalar(name, value, row["step"])
            self._board.flush()

    def save(
        self, step: int, tensors: dict[str, Tensor], best: tuple[int, dict[str, Tensor]] | None, record: Row
    ) -> None:
        """Saves in the background; `best` are weights, with their step, that became the best since the last time."""
        if self._writer is None:
            return
        checkpoints = {f"best-{best[0]:09d}": checkpoint.to_cpu(best[1])} if best else {}
        checkpoints[f"step-{step:09d}"] = checkpoint.to_cpu(tensors)
        record = {"step": step, "config": configs.to_dict(self.config), **record, "history": list(record["history"])}
        self._writer.save(checkpoints, record)

    def finish(self, summary: Any) -> None:
        """The summary comes last: a folder that has one holds all the rest."""
        if self.folder is not None and self._writer is not None:
            self._writer.wait()
            self.folder.write("summary.json", dataclasses.asdict(summary))

    def close(self) -> None:
        with self._lock:  # let go in any case
            if self._board is not None:
                self._board.close()
            if self._writer is not None:
                self._writer.close()
                self._writer.wait()


def newest_of(folder: RunFolder) -> list[str]:
    """The name of the newest checkpoint, if there is one."""
    return checkpoint.names(folder.checkpoints, "step")[:1]


def load(folder: RunFolder, config: Run) -> tuple[dict[str, Tensor], Row, list[str]] | None:
    """The newest whole checkpoint of an unfinished run, with warnings; None where it was stopped before the first."""
    if folder.finished:
        raise ValueError(f"{folder.path} holds a finished run; there is nothing to resume")
    if folder.config() != config:
        raise ValueError(f"{folder.path} holds a run with another config; resume it with the config in its config.json")
    folder.check_writable()
    found = checkpoint.read_newest(folder.checkpoints)
    if found is None:
        return None
    _, tensors, record, warned = found
    _check_config(folder, configs.from_dict(Run, record["config"]), config)
    return tensors, record, warned


def _check_config(folder: RunFolder, trained: Run, config: Run) -> None:
    """Refuses a config.json that was changed after the run began: what it describes is not what was trained. The data
    may have moved (`check_data` compares it), and a step may be computed another way."""
    for name, then, now in configs.differences(trained, config):
        if name not in ("data.name", "data.root", "train.mode", "train.backend"):
            raise ValueError(
                f"{folder.path / 'config.json'} has {name} {now}, but the run was trained with {then} so far; put it"
                " back, or start a new run"
            )


def load_weights(folder: str | Path, which: str = "last") -> dict[str, Tensor]:
    """Weights of a run as it was evaluated: the `last`, or the `best` by validation (without one: test) accuracy. Of a
    damaged checkpoint it warns, and takes the one before."""
    weights, _, warned = read_weights(folder, which)
    for text in warned:
        warnings.warn(text, stacklevel=2)
    return weights


def read_weights(folder: str | Path, which: str = "last") -> tuple[dict[str, Tensor], int, list[str]]:
    """What `load_weights` gives, the step that they are of, and its warnings."""
    run = RunFolder(folder)
    configs.check_choice("checkpoint", which, ("last", "best"))
    config = run.config()
    found = checkpoint.read_newest(run.checkpoints, "step" if which == "last" else "best")
    if found is None:
        raise ValueError(f"{run.path} has no checkpoint of kind {which}")
    name, tensors, record, warned = found
    _check_config(run, configs.from_dict(Run, record["config"]), config)
    prefix = "model."
    weights = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    weights = {name: tensors.get(f"ema.{name}", value) for name, value in weights.items()}
    return weights, int(name.partition("-")[2]), warned


def need_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard")


def _tensorboard(path: Path, step: int) -> Any:
    """A writer of event files; what an interrupted run wrote from `step` on is dropped."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path), purge_step=step)
