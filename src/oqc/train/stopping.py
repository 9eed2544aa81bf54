"""Why training ends early: a signal, or steps that are not finite."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType

import torch
import torch.distributed as dist

from oqc.train.distributed import rank_and_world
from oqc.train.summary import Summary

REPEAT = 1.0  # seconds in which the same signal is the same request: `timeout` and launchers send one twice


@dataclass
class StopRequest:
    signal: int | None = None

    def heard(self, device: torch.device) -> int | None:
        """The signal, whichever process it came to. All must ask, so none goes on before the others have come here."""
        if rank_and_world()[1] == 1:
            return self.signal
        number = torch.tensor(self.signal or 0, device=device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number) or None


class Ended(RuntimeError):
    """A run came to no end of its own. `outcomes` are those of all runs trained with it that have one, by their number:
    a summary, or why there is none."""

    outcomes: Mapping[int, Summary | Ended] = MappingProxyType({})


class Stopped(Ended):
    """A signal ended the run after a step; its state is saved if it has a folder. `unstarted` are the numbers of the
    runs trained with it of which nothing was trained."""

    def __init__(self, number: int, step: int, folders: list[Path], unstarted: Sequence[int] = ()) -> None:
        text = f"stopped by {signal.Signals(number).name} after step {step}"
        if folders:
            each = (f"--resume {shlex.quote(str(folder))}" for folder in folders)
            text += f"; continue with: oqc train {' '.join(each)}"
        if unstarted:
            text += f"; {'1 more run is' if len(unstarted) == 1 else f'{len(unstarted)} more runs are'} left"
        super().__init__(text)
        self.signal, self.step, self.folders, self.unstarted = number, step, folders, unstarted


class Diverged(Ended):
    """Too many non-finite steps in a row; the weights are those of the last finite step."""

    def __init__(self, row: int, limit: int, step: int, folder: Path | None) -> None:
        where = f"; the last finite state is in {folder / 'checkpoints'}" if folder else ""
        super().__init__(
            f"stopped at step {step}: {row} steps in a row had a non-finite loss or gradient"
            f" (train.nan_limit {limit}){where}; a lower train.lr or precision fp32 may help"
        )


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGINT and SIGTERM become a request to stop at the next step; a second one stops at once, if it is
    the other or comes more than `REPEAT` later."""
    request, heard = StopRequest(), 0.0
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if not heard:
            request.signal, heard = number, time.monotonic()
        elif number != request.signal or time.monotonic() - heard > REPEAT:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
