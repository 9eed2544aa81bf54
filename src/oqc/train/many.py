"""Several runs on one device at once: each has its own stream, graph and memory, one host thread feeds them in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext

import torch

from oqc.train.numerics import preserved_generator
from oqc.train.stopping import Diverged, Ended, Stopped, StopRequest, stop_on_signals
from oqc.train.summary import Summary
from oqc.train.trainer import Trainer

GAIN = 1.05  # one more run at once must give this much more images/s to be worth its memory
MEASURED = 20  # steps of each run in a measurement


def train_many(
    make: Sequence[Callable[[], Trainer]], at_once: int | str = "auto", stop: StopRequest | None = None
) -> list[Summary]:
    """Trains the runs that `make` builds, at most `at_once` at a time, each bit for bit as it would be alone.

    `auto` adds runs while bare steps of one more raise the total images/s. On the CPU runs go one after another.
    A run that diverges lets the others finish; a signal saves all that are under way. `stop` is the request of a caller
    who hears signals already.
    """
    if at_once != "auto" and (not isinstance(at_once, int) or at_once < 1):
        raise ValueError(f"at_once must be auto or 1 or more, got {at_once!r}")
    if not make:
        return []
    built = [make[0]()]
    device = built[0].device
    with nullcontext(stop) if stop else stop_on_signals() as stop, preserved_generator(device):
        limit = 1
        if device.type == "cuda" and built[0].world == 1:  # several processes would choose each for itself
            built[0].prepare()
            if built[0].step.draws and len(make) > 1:  # graphs share the memory that holds the generator's seed
                built[0].progress.note("the model draws random numbers (dropout): its seeds run one after another")
            else:
                limit = at_once if isinstance(at_once, int) else faster_together(built, make)
        return _interleave(built, make, limit, stop)


def faster_together(trainers: list[Trainer], make: Sequence[Callable[[], Trainer]]) -> int:
    """How many runs at once give the most images/s, by bare steps; where one fills the GPU, a few seconds show it.
    Appends to `trainers`, which are the first, those that it had to build."""
    limit, rate = 1, 0.0
    while limit < len(make):
        rate = rate or replay_rate(trainers, MEASURED)
        try:
            trainers.append(make[limit]())
            more = replay_rate(trainers, MEASURED)
        except torch.OutOfMemoryError:
            del trainers[limit:]
            break
        if more < GAIN * rate:
            break
        limit, rate = limit + 1, more
    torch.cuda.empty_cache()
    return limit


def _interleave(
    built: list[Trainer], make: Sequence[Callable[[], Trainer]], limit: int, stop: StopRequest
) -> list[Summary]:
    """Feeds up to `limit` runs in turn until all are done; `built` are the first of them, which exist already."""
    device = built[0].device
    outcomes: dict[int, Summary | Ended] = {}
    active: dict[int, Generator[None, None, Summary]] = {}
    started = 0
    while True:
        while len(active) < limit and started < len(make) and stop.heard(device) is None:
            trainer = built.pop(0) if built else make[started]()
            trainer.prepare()
            active[started] = trainer.run(stop)
            del trainer
            started += 1
        if not active:
            break
        for number, steps in list(active.items()):
            try:
                next(steps)
            except StopIteration as end:
                outcomes[number] = end.value
            except Ended as end:
                outcomes[number] = end
            else:
                continue
            del active[number]
    signal = stop.heard(device)  # no process leaves before the first has saved: torchrun would end that one
    stopped = {number: end for number, end in outcomes.items() if isinstance(end, Stopped)}
    diverged = {number: end for number, end in outcomes.items() if isinstance(end, Diverged)}
    if signal is not None and (stopped or started < len(make)):
        step = max((end.step for end in stopped.values()), default=0)
        begun = {n for n in outcomes if n not in stopped or stopped[n].step or stopped[n].folders}
        unstarted = [n for n in range(len(make)) if n not in begun]
        halt: Ended = Stopped(signal, step, [f for end in stopped.values() for f in end.folders], unstarted)
    elif diverged:
        halt = diverged[min(diverged)]
    else:
        return [end for _, end in sorted(outcomes.items()) if isinstance(end, Summary)]
    halt.outcomes = outcomes
    raise halt


def replay_rate(trainers: Sequence[Trainer], steps: int) -> float:
    """Images/s of bare steps, those of several trainers interleaved; the training state is as before afterwards."""
    before = []
    for trainer in trainers:
        trainer.prepare()
        with trainer.scope():
            before.append({name: value.clone() for name, value in trainer.step.state().items()})
    with preserved_generator(trainers[0].device):
        _replay(trainers, 3)
        began = time.perf_counter()
        _replay(trainers, steps)
        seconds = time.perf_counter() - began
    for trainer, state in zip(trainers, before, strict=True):
        with trainer.scope():
            trainer.step.load(state)
        trainer.synchronize()
    return steps * sum(trainer.config.train.batch for trainer in trainers) / seconds


def _replay(trainers: Sequence[Trainer], steps: int) -> None:
    for _ in range(steps):
        for trainer in trainers:
            with trainer.scope():
                trainer.step.replay()
    for trainer in trainers:
        trainer.synchronize()
