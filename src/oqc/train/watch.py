"""Reading the device from the host without holding it up."""

from __future__ import annotations

import time

import torch
from torch import Tensor

MOST = 64  # steps between two looks


class Mailbox:
    """Brings a small device tensor to the host one exchange late, so that the device always has work queued."""

    def __init__(self, source: Tensor) -> None:
        self.source = source
        cuda = source.is_cuda
        self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=cuda)
        self._event = torch.cuda.Event(blocking=True) if cuda else None
        self._sent = False

    def exchange(self) -> list[float] | None:
        """The values as of the last call, waiting for the device to have got there; then asks for those of now."""
        if self._event is not None and self._sent:
            self._event.synchronize()
        values = self._copy.tolist() if self._sent else None
        self._copy.copy_(self.source, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._sent = True
        return values


class Stopwatch:
    """Seconds between two points of a stream (of the host's clock on the CPU)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._start = self._end = 0.0
        if self._cuda:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def start(self) -> None:
        if self._cuda:
            self._events[0].record()
        self._start = time.perf_counter()

    def stop(self) -> None:
        if self._cuda:
            self._events[1].record()
        self._end = time.perf_counter()

    def seconds(self) -> float:
        """Waits for the device to pass the end."""
        if not self._cuda:
            return self._end - self._start
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1000


class Pace:
    """How fast steps go by, and how many to let pass before the host looks again: `wanted` is about `interval` seconds.

    `every` is what holds. It is set from outside, since several processes must look at the same steps.
    """

    def __init__(self, interval: float = 0.2, most: int = MOST) -> None:
        self.interval, self.most = interval, min(most, MOST)
        self.every = self.wanted = 1
        self._step, self._time = 0, time.perf_counter()

    def restart(self, step: int) -> None:
        self._step, self._time = step, time.perf_counter()

    def due(self, step: int) -> bool:
        return step - self._step >= self.every

    def look(self, step: int) -> float:
        """Steps per second since the last look."""
        now = time.perf_counter()
        rate = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        self.wanted = max(1, min(self.most, int(rate * self.interval)))
        return rate
