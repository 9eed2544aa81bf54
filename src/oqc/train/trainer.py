"""The trainer: runs the steps of one run, evaluates, records, saves and resumes.

`run` is a generator that gives way after each enqueued step, so that several runs can share a device from one host
thread (`oqc.train.many`). The host stays a fraction of a second ahead of the device and reads the counters of a while
ago; it waits for the device only where an evaluation is read and where a checkpoint is taken.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oqc.config import Run
from oqc.data import Batches, Dataset
from oqc.train import recorder
from oqc.train.checkpoint import parameter_hash
from oqc.train.distributed import rank_and_world
from oqc.train.environment import environment, find_device
from oqc.train.evaluation import Evaluator
from oqc.train.folder import Row, RunFolder
from oqc.train.numerics import DTYPES, autocast, numerics, preserved_generator
from oqc.train.optim import learning_rate
from oqc.train.progress import Progress, Silent, Status
from oqc.train.step import BAD, CORRECT, IMAGES, LONGEST, LOOK, LOSS, STOP, Step, can_compile, resolve_mode
from oqc.train.stopping import Diverged, Stopped, StopRequest, stop_on_signals
from oqc.train.summary import Summary, best_row, summarise
from oqc.train.watch import Mailbox, Pace, Stopwatch

# What a checkpoint holds of a trainer besides the step's tensors.
RECORDED = ("history", "seconds", "train_seconds", "window_seconds", "prepare_seconds")


class Trainer:
    """Trains `model` on `dataset` as `config` says; with a `folder`, on record and resumable.

    The model is moved to the device, trained in place and keeps its final weights; `evaluated` is the model that the
    accuracies are of (the averaged one where `train.ema` is set). Under `torch.distributed` every rank makes a
    trainer and rank 0 writes. `save_seconds` is the least time between two checkpoints of a run that goes well.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        config: Run,
        folder: str | Path | None = None,
        *,
        device: torch.device | str | None = None,
        progress: Progress | None = None,
        resume: bool = False,
        overwrite: bool = False,
        tensorboard: bool = False,
        notes: Mapping[str, Any] | None = None,
        compile_blocks: bool | None = None,
        save_seconds: float = 30.0,
    ) -> None:
        target = RunFolder(folder) if folder is not None else None
        found = newest = None
        if target is not None and resume:
            target.check_data(dataset)
            newest = recorder.newest_of(target)
            found = recorder.load(target, config)
        elif target is not None:
            target.check(overwrite=overwrite)
        classes = getattr(getattr(model, "config", None), "num_classes", len(dataset.classes))
        if classes < len(dataset.classes):
            raise ValueError(f"model has {classes} classes, the data set {dataset.name} has {len(dataset.classes)}")
        self.device = find_device(device)
        self.config, self.dataset, self.progress = config, dataset, progress or Silent()
        self.rank, self.world = rank_and_world()
        self.folder = target.path if target else None
        self.save_seconds = save_seconds

        train, dtype = config.train, DTYPES[config.train.precision]
        mode, note = resolve_mode(train.mode, self.device, self.world)
        compiled = can_compile(self.device) if compile_blocks is None else compile_blocks
        compiled = mode == "compiled" or (mode == "graph" and compiled)
        self.model = model.to(self.device, dtype).train()
        self._check_fit()
        if tensorboard:
            recorder.need_tensorboard()
        batches = Batches(
            dataset.train,
            dataset,
            config.data,
            batch=train.batch,
            seed=train.seed,
            device=self.device,
            dtype=dtype,
            rank=self.rank,
            world=self.world,
        )
        self.step = Step(self.model, batches, config, self.device, mode=mode, compiled=compiled)
        self.per_epoch, self.total = batches.steps_per_epoch, self.step.total
        self.evaluated = self.step.average.model if self.step.average else self.model
        splits = {"test": dataset.test} | ({} if dataset.val is None else {"val": dataset.val})
        self.evaluators = {
            name: Evaluator(
                self.evaluated,
                split,
                dataset,
                self.device,
                precision=train.precision,
                batch=train.batch,
                capture=mode == "graph",
            )
            for name, split in splits.items()
        }
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.watch, self.mailbox = Stopwatch(self.device), Mailbox(self.step.stats)
        self.pace = Pace(most=train.eval_every * self.per_epoch)  # at least one look between two evaluations

        self.done = 0  # steps enqueued
        self.history: list[Row] = []
        self.best: tuple[int, dict[str, Tensor]] | None = None  # step and weights of the best, until they are on disk
        self.seconds = self.train_seconds = self.window_seconds = self.prepare_seconds = 0.0
        self._prepared, self._agreed, self._began = False, 0, 0.0

        self._resumed, self._overwrite, self._notices = resume, overwrite, [note] if note else []
        if found is not None:
            self._load(*found[:2])
            self._notices += found[2]
        elif target is not None and resume:
            how = f"one is written after an evaluation, at most every {save_seconds:g} s"
            self._notices.append(f"no checkpoint yet ({how}): from the start")
        self.recorder = recorder.Recorder(
            target if self.rank == 0 else None, config, newest=newest, tensorboard=tensorboard
        )
        self._notes = {"mode": mode, "compiled_blocks": compiled, "processes": self.world, **(notes or {})}

    def fit(self) -> Summary:
        """Trains to the end. SIGINT and SIGTERM save and raise `Stopped`; non-finite steps may raise `Diverged`."""
        with stop_on_signals() as stop, preserved_generator(self.device):
            steps = self.run(stop)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value

    def prepare(self) -> None:
        """Compiles and captures; `run` does it if nobody did."""
        if self._prepared:
            return
        began = time.perf_counter()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.scope():
            self.step.prepare(self.stream)
            for evaluator in self.evaluators.values():
                evaluator.prepare(self.stream)
        self.synchronize()
        self.prepare_seconds += time.perf_counter() - began
        self._prepared = True

    @contextmanager
    def scope(self) -> Iterator[None]:
        """This run's stream and numerics; entered anew for each piece of work, never while another run goes on."""
        train = self.config.train
        stream = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        with stream, numerics(tf32=train.tf32, deterministic=train.deterministic):
            yield

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def run(self, stop: StopRequest) -> Generator[None, None, Summary]:
        """Trains to the end, giving way after each enqueued step and before reading an evaluation."""
        try:
            self.prepare()
            if number := stop.heard(self.device):
                raise Stopped(number, self.done, [self.folder] if self.folder and self._resumed else [])
            if (row := int(self.step.stats[LONGEST])) >= (limit := self.config.train.nan_limit):
                raise Diverged(row, limit, self.done, self.folder)
            self._announce()  # last: what stood in the folder goes only when this run is ready to start
            saved = time.perf_counter()
            self._began = saved - self.seconds
            self.pace.restart(self.done)
            new_window = True
            while self.done < self.total:
                with self.scope():
                    if new_window:
                        self.watch.start()
                    if new_window or self.done % self.per_epoch == 0:
                        self.step.batches.start_epoch(self.done // self.per_epoch)
                    self.step(self.done)
                    self.done += 1
                    self._look(stop)
                yield
                new_window = self._window_ends()
                if new_window:
                    with self.scope():
                        self.watch.stop()
                        accuracies = {name: evaluator.start() for name, evaluator in self.evaluators.items()}
                    yield
                    with self.scope():
                        self._finish_window({name: value.item() for name, value in accuracies.items()})
                        if self.done == self.total or time.perf_counter() - saved >= self.save_seconds:
                            self._save()
                            saved = time.perf_counter()
                    self.pace.restart(self.done)
                number = stop.signal if self.world == 1 else self._agreed
                if number and self.done < self.total:
                    with self.scope():
                        self._save(mid_window=not new_window)
                    raise Stopped(number, self.done, [self.folder] if self.folder else [])
            return self._finish()
        finally:
            self.synchronize()
            self.step.release()
            self.recorder.close()

    def _window_ends(self) -> bool:
        """Whether an evaluation is due."""
        return self.done % (self.config.train.eval_every * self.per_epoch) == 0 or self.done == self.total

    def _check_fit(self) -> None:
        """One image through the model: what does not fit shows before anything is written."""
        images = self.dataset.train.images[:1]
        self.model.eval()
        with torch.no_grad(), autocast(self.device, self.config.train.precision):
            logits = self.model(images.to(self.device, DTYPES[self.config.train.precision]))
        self.model.train()
        classes = len(self.dataset.classes)
        if not isinstance(logits, Tensor):
            raise ValueError(f"the model must return logits as one tensor, got a {type(logits).__name__}")
        if logits.shape != (1, classes):
            raise ValueError(
                f"the model's output for one image is {list(logits.shape)}, but {self.dataset.name} has"
                f" {classes} classes"
            )

    def _announce(self) -> None:
        """Makes the folder, or goes on in it, and tells what is worth knowing before the first step."""
        if self.recorder.folder is not None:
            about = {name: getattr(self.dataset, name) for name in ("name", "digest", "classes", "mean", "std")}
            place = environment(self.device) | self._notes | {"data": about}
            self.recorder.start(place, self.history, resumed=self._resumed, overwrite=self._overwrite)
        if self.rank == 0:
            for notice in self._notices:
                self.progress.note(notice)

    def _look(self, stop: StopRequest) -> None:
        """Reads the counters as of the look before, and asks for those of now."""
        if not self.pace.due(self.done):
            return
        if self.world > 1:
            self.step.stats[STOP].fill_(stop.signal or 0)
            self.step.stats[LOOK].fill_(self.pace.wanted)
            dist.all_reduce(self.step.stats[STOP:], dist.ReduceOp.MAX)
        values, rate = self.mailbox.exchange(), self.pace.look(self.done)
        if values is None:
            return
        self._agreed = int(values[STOP])
        self.pace.every = self.pace.wanted if self.world == 1 else int(values[LOOK])
        if not self._window_ends():  # where one does, it is checked after the evaluation
            self._check(values, mid_window=True)
        images = max(values[IMAGES], 1)
        status = Status(
            step=self.done,
            total=self.total,
            epoch=-(-self.done // self.per_epoch),
            epochs=self.config.train.epochs,
            loss=values[LOSS] / images,
            accuracy=100 * values[CORRECT] / images,
            images_per_s=rate * self.config.train.batch,
            eta=(self.total - self.done) / rate,
        )
        if self.rank == 0:
            self.progress.status(status)

    def _check(self, values: list[float], *, mid_window: bool) -> None:
        if values[LONGEST] >= (limit := self.config.train.nan_limit):
            self._save(mid_window=mid_window)
            raise Diverged(int(values[LONGEST]), limit, self.done, self.folder)

    def _stats(self) -> Tensor:
        """The counters on the host, their sums over all ranks."""
        stats = self.step.stats.clone()
        if self.world > 1:
            dist.all_reduce(stats[: IMAGES + 1])
        return stats.cpu()

    def _finish_window(self, accuracies: dict[str, float]) -> None:
        """Writes down an evaluation and what was trained since the one before."""
        train, stats = self.config.train, self._stats().tolist()
        self.step.stats[: IMAGES + 1].zero_()
        self.seconds = time.perf_counter() - self._began
        seconds = self.window_seconds + self.watch.seconds()
        images = (self.done - (self.history[-1]["step"] if self.history else 0)) * train.batch
        self.window_seconds, self.train_seconds = 0.0, self.train_seconds + seconds
        last = torch.tensor(self.done - 1)
        row: Row = {
            "epoch": self.done // self.per_epoch,
            "step": self.done,
            "lr": learning_rate(last, peak=train.lr, warmup=self.step.warmup, total=self.total).item(),
            "train_loss": stats[LOSS] / stats[IMAGES] if stats[IMAGES] else None,
            "train_accuracy": 100 * stats[CORRECT] / stats[IMAGES] if stats[IMAGES] else None,
            **{f"{name}_accuracy": value for name, value in accuracies.items()},
            "non_finite": int(stats[BAD]),
            "images_per_s": images / seconds,
            "seconds": self.seconds,
        }
        self.history.append(row)
        if self.recorder.folder is not None and best_row(self.history) is row:
            weights = {f"model.{name}": value.clone() for name, value in self.evaluated.state_dict().items()}
            self.best = (self.done, weights)
        self.recorder.evaluated(row)
        if self.rank == 0:
            self.progress.evaluated(row)
        self._check(stats, mid_window=False)

    def _save(self, *, mid_window: bool = False) -> None:
        """Hands the state to the recorder, all ranks' sums in it; between windows those are zero."""
        stats = self._stats() if mid_window else self.step.stats.cpu()
        stats[STOP:] = 0
        self.seconds = time.perf_counter() - self._began
        if mid_window:
            self.watch.stop()
            self.window_seconds += self.watch.seconds()
        record = {name: getattr(self, name) for name in RECORDED}
        self.recorder.save(self.done, self.step.state() | {"train.stats": stats}, self.best, record)
        self.best = None

    def _load(self, tensors: dict[str, Tensor], record: Row) -> None:
        stats = tensors["train.stats"]
        if self.rank > 0:
            stats[: IMAGES + 1] = 0
        self.done = record["step"]
        limit = self.config.train.nan_limit
        if stats[LONGEST] >= limit and self.done < self.total:  # the first step shows whether it goes on diverging
            stats[LONGEST] = limit - 1
        self.step.load(tensors)
        for name in RECORDED:
            setattr(self, name, record[name])

    def _finish(self) -> Summary:
        summary = summarise(
            self.history,
            parameters=sum(p.numel() for p in self.model.parameters()),
            images_per_s=self.total * self.config.train.batch / self.train_seconds,
            seconds=self.seconds,
            prepare_seconds=self.prepare_seconds,
            parameter_hash=parameter_hash(self.model),
        )
        self.recorder.finish(summary)
        return summary
