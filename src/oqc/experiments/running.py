"""Many runs: one after another (or side by side) on a GPU, in processes of one thread each on a CPU.

Both ways start a job when they have room for it and give it back with its record.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from typing import Any

import torch

from oqc.experiments.job import Built, Job, Limited, Outcome, OutOfTime
from oqc.report import Record
from oqc.train import Diverged, Progress, Silent, Summary, Trainer, train_many
from oqc.train.environment import environment
from oqc.train.many import faster_together
from oqc.train.step import room_for_compiled_models
from oqc.train.stopping import Ended, Stopped, StopRequest


def train_jobs(
    todo: Sequence[Job],
    device: torch.device,
    stop: StopRequest,
    *,
    may_start: Callable[[Job], bool] = lambda job: True,
    limit: Callable[[Job], float | None] = lambda job: None,
    workers: int | None = None,
    watch: Callable[[Job], Progress] = lambda job: Silent(),
    shared: bool = False,
) -> Generator[Outcome, None, None]:
    """Trains the jobs and gives each back as it ends. Asks before each whether it `may_start`; a no ends it all. Asks
    too for a `limit` in seconds: a run that would take longer is dropped after its first epoch and none is started any
    more; on a CPU those beside it end first. `OutOfTime` comes where it has none to give back.
    `shared`: other work uses the device, so nothing is measured, and the records say so.

    A signal ends it too, without the runs under way: on a GPU with `Stopped`.
    """
    jobs = itertools.takewhile(may_start, todo)
    place = environment(device)
    del place["command"]  # it may hold paths; preset, seed and config say what was run
    if device.type == "cpu":
        place["threads"] = 1
        outcomes = _in_processes(jobs, limit, cpu_workers(workers), stop)
    else:
        outcomes = _in_turn(jobs, todo, device, stop, lambda job: _limited(watch(job), job, limit(job)), shared)
    for job, found in outcomes:
        told = {"environment": place} | ({"shared_device": True} if shared else {})
        yield job, found | told


def _limited(progress: Progress, job: Job, seconds: float | None) -> Progress:
    return progress if seconds is None else Limited(progress, job.run.train.epochs, seconds)


# On a GPU: everything in this process, so that data and libraries are loaded and kernels are compiled once.


def _in_turn(
    jobs: Iterator[Job],
    todo: Sequence[Job],
    device: torch.device,
    stop: StopRequest,
    watch: Callable[[Job], Progress],
    shared: bool,
) -> Iterator[Outcome]:
    def build(job: Job) -> Built:
        return Built(job, device, watch(job))

    def copy() -> Trainer:
        return Built(group[0].job, device, Silent()).trainer

    with room_for_compiled_models(), _compiling_ahead(todo, device) as compiling:
        group = [build(job) for job in itertools.islice(jobs, 1)]
        at_once = faster_together([group[0].trainer], [copy] * len(todo)) if group and not shared else 1
        any_ended = False
        while group:
            group += [build(job) for job in itertools.islice(jobs, at_once - len(group))]
            for one in group:
                if not shared and not compiling():  # which would share the device
                    one.measure_alone()
            del one  # its memory is for the next group
            if stop.signal is not None:  # came while these were built
                return
            try:
                for outcome in _train(group, stop):
                    any_ended = True
                    yield outcome
            except OutOfTime:
                if not any_ended:
                    raise
                return
            group = []  # lets go of the graphs and their memory before the next ones are built
            gc.collect()
            group = [build(job) for job in itertools.islice(jobs, 1)]


def _train(group: list[Built], stop: StopRequest) -> Iterator[Outcome]:
    """Those of a group that ended or diverged, where a signal ends the others too: `Stopped` comes after them."""
    many, halt = len(group), None
    try:
        found = train_many([functools.partial(_trainer, one) for one in group], many, stop)
        outcomes: Mapping[int, Summary | Ended] = dict(enumerate(found))
    except (Diverged, Stopped) as error:
        outcomes, halt = error.outcomes, error
    for number, end in sorted(outcomes.items()):
        one = group[number]
        if isinstance(end, Summary):
            yield one.job, one.record(end, at_once=many)
        elif isinstance(end, Diverged):
            yield one.job, one.diverged(at_once=many)
    if isinstance(halt, Stopped):
        raise halt


def _trainer(built: Built) -> Trainer:
    return built.trainer


@contextlib.contextmanager
def _compiling_ahead(todo: Sequence[Job], device: torch.device) -> Iterator[Callable[[], bool]]:
    """Has a process of its own compile what later models need, while the first one trains. PyTorch and Triton keep
    compiled code on disk, where this process finds it when it gets there. Gives a function: is it still at it?"""
    later = list({job.run.model: job for job in todo}.values())[1:]
    process = multiprocessing.get_context("spawn").Process(target=_compile, args=(later, device))
    if later:
        with _unheard():
            process.start()
    try:
        yield process.is_alive if later else lambda: False
    finally:
        if later:
            process.terminate()
            process.join()


def _compile(jobs: Sequence[Job], device: torch.device) -> None:
    _start_worker()
    with room_for_compiled_models():
        for job in jobs:
            with contextlib.suppress(RuntimeError):  # no memory beside the run that trains: it compiles when it starts
                Built(job, device, Silent()).trainer.prepare()
            gc.collect()


# On a CPU: a process a run, as many as there are cores for us; models this small gain nothing from more threads.


def cpu_workers(given: int | None) -> int:
    if given:
        return given
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_processes(
    jobs: Iterator[Job], limit: Callable[[Job], float | None], workers: int, stop: StopRequest
) -> Iterator[Outcome]:
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    under_way: dict[Future[Any], Job] = {}
    late: OutOfTime | None = None  # one that takes too long lets those beside it end
    any_ended = False
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        try:
            while stop.signal is None:
                for job in itertools.islice(jobs, 0 if late else workers - len(under_way)):
                    with _unheard():
                        under_way[pool.submit(_work, job, limit(job))] = job
                if not under_way:
                    if late is not None and not any_ended:
                        raise late
                    return
                ended = wait(under_way, timeout=0.5, return_when=FIRST_COMPLETED).done
                for future in sorted(ended, key=lambda one: one.exception() is not None):  # records come first
                    job = under_way.pop(future)
                    try:
                        found = future.result()
                    except OutOfTime as error:
                        late = error
                        continue
                    except BrokenProcessPool:
                        if stop.signal is not None:  # the same signal reached the worker
                            return
                        raise ChildProcessError(f"the process of {job} was killed; out of memory?") from None
                    any_ended = True
                    yield job, found
        finally:
            if under_way:  # whoever ends this early does not wait for runs that nobody will hear of
                for child in set(multiprocessing.active_children()) - others:
                    child.terminate()


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """A process that is started here does not hear Ctrl-C while it imports; one that comes meanwhile is heard after."""
    if not hasattr(signal, "pthread_sigmask"):  # not a POSIX system
        yield
        return
    resource_tracker.ensure_running()  # which would lift the mask when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    """One thread; Ctrl-C is the parent's to hear; and no life without the parent, so that a kill leaves nothing."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _work(job: Job, seconds: float | None) -> Record:
    """One run in a worker. Signals are not caught, as `Trainer.fit` would: SIGTERM ends the process at once."""
    built = Built(job, torch.device("cpu"), _limited(Silent(), job, seconds))
    steps = built.trainer.run(StopRequest())
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return built.record(end.value)
        except Diverged:
            return built.diverged()
