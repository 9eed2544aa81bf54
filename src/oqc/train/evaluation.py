"""Accuracy on a split, every image counted once over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oqc.data import Dataset, Split, eval_batches
from oqc.train.distributed import rank_and_world
from oqc.train.numerics import DTYPES, autocast


class Evaluator:
    """Counts correct predictions of a model on one split, which it keeps on the device.

    With `capture` a batch is one CUDA graph over fixed buffers, where a short last batch is filled up with label -1,
    which no prediction equals. Compiled blocks run uncompiled here: all modes of training evaluate alike.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        dataset: Dataset,
        device: torch.device,
        *,
        precision: str,
        batch: int,
        capture: bool = False,
    ) -> None:
        self.model, self.dataset, self.device, self.precision = model, dataset, device, precision
        self.split = split.to(device)
        self.batch, self.capture = min(batch, len(split.labels)), capture
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self.x = torch.zeros(self.batch, *split.images.shape[1:], dtype=DTYPES[precision], device=device)
        self.labels = torch.full((self.batch,), -1, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def prepare(self, stream: torch.cuda.Stream | None) -> None:
        if not self.capture:
            return
        with _evaluating(self.model):
            self._count(self.x, self.labels)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self._count(self.x, self.labels)

    def start(self) -> Tensor:
        """Enqueues the evaluation; the accuracy in percent is in the returned tensor once the device gets there."""
        rank, world = rank_and_world()
        self.correct.zero_()
        batches = eval_batches(
            self.split,
            self.dataset,
            batch=self.batch,
            device=self.device,
            dtype=DTYPES[self.precision],
            rank=rank,
            world=world,
        )
        with _evaluating(self.model):
            for x, labels in batches:
                if self.graph is None:
                    self._count(x, labels)
                    continue
                self.x[: len(x)].copy_(x)
                self.labels[: len(x)].copy_(labels)
                self.labels[len(x) :].fill_(-1)
                self.graph.replay()
        if world > 1:
            dist.all_reduce(self.correct)
        return self.correct.double() * 100 / len(self.split.labels)

    def _count(self, x: Tensor, labels: Tensor) -> None:
        with autocast(self.device, self.precision):
            logits = self.model(x)
        self.correct.add_((logits.argmax(1) == labels).sum())


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, without gradients and without compiled code."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(training)
