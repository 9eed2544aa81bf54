"""What a run tells while it goes on: nothing, a line per evaluation, or a live bar on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from oqc.train.folder import Row


@dataclass(frozen=True)
class Status:
    """Where training is; loss and accuracy (percent) are over the training images since the last evaluation."""

    step: int
    total: int
    epoch: int
    epochs: int
    loss: float
    accuracy: float
    images_per_s: float
    eta: float  # seconds


class Progress(Protocol):
    def status(self, status: Status) -> None: ...
    def evaluated(self, row: Row) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    def status(self, status: Status) -> None: ...
    def evaluated(self, row: Row) -> None: ...
    def note(self, text: str) -> None: ...


class Display:
    """Shows several runs on one console: bars where it is a terminal, lines elsewhere and for what should stay."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = RichProgress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), console=console
        )

    @contextmanager
    def shown(self) -> Iterator[Display]:
        if not self.console.is_terminal:
            yield self
            return
        with self.live:
            yield self

    def run(self, label: str) -> Progress:
        return _Shown(self, label)


class _Shown:
    def __init__(self, display: Display, label: str) -> None:
        self.display, self.label, self.left = display, label, ""
        self.task = display.live.add_task(label, total=None, text="preparing")

    def status(self, status: Status) -> None:
        self.left = f"{_duration(status.eta)} left"
        text = (
            f"epoch {status.epoch}/{status.epochs}  loss {status.loss:.4f}  accuracy {status.accuracy:.2f}"
            f"  {status.images_per_s:,.0f} images/s  {self.left}"
        )
        self.display.live.update(self.task, completed=status.step, total=status.total, text=text)

    def evaluated(self, row: Row) -> None:
        parts = [f"epoch {row['epoch']}"]
        if row["train_loss"] is not None:
            parts += [f"loss {row['train_loss']:.4f}", f"train {row['train_accuracy']:.2f}"]
        parts += [f"{name} {row[f'{name}_accuracy']:.2f}" for name in ("val", "test") if f"{name}_accuracy" in row]
        parts += [f"{row['images_per_s']:,.0f} images/s", self.left]
        if row["non_finite"]:
            parts.append(f"{row['non_finite']} non-finite steps")
        self.note("  ".join(part for part in parts if part))

    def note(self, text: str) -> None:
        self.display.console.print(f"{self.label}  {text}", highlight=False, markup=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
