"""One training step, the same code run eagerly, with compiled blocks, or replayed from one CUDA graph.

A step takes the batch of the step counter, runs forward, loss and backward, clips, lets AdamW and the moving average
update, and counts. Everything it needs to know per step is a tensor on the device, so the host sends no values and
waits for none.

A step whose loss or gradient norm is not finite changes nothing but the counters: `found_inf` makes the fused AdamW
kernel return early and take its step count back, and the moving average keeps its old value.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from oqc import seeding
from oqc.config import Run
from oqc.train.numerics import autocast, default_generator
from oqc.train.optim import learning_rate, make_optimizer

WARMUP = 3  # steps before a capture: library handles, workspaces and compiled code come into being in these
LOSS, CORRECT, IMAGES, BAD, ROW, LONGEST, STOP, LOOK = range(8)  # places in `Step.stats`


class BatchSource(Protocol):
    """What `oqc.data.Batches` gives."""

    steps_per_epoch: int

    def start_epoch(self, epoch: int) -> None: ...
    def next(self, step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class Step:
    """The step of one run. `mode` is eager, compiled or graph; `compiled` says whether blocks are compiled.

    `stats` (float64, on the device): summed loss, correct predictions and images since the last evaluation, then
    non-finite steps in all, in a row now, in a row at most; and two by which ranks agree on when to stop and to look.
    """

    def __init__(
        self, model: nn.Module, batches: BatchSource, config: Run, device: torch.device, *, mode: str, compiled: bool
    ) -> None:
        self.model, self.batches, self.config, self.device = model, batches, config, device
        self.mode, self.compiled = mode, compiled
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        train = config.train
        self.total = train.epochs * batches.steps_per_epoch
        self.warmup = min(round(train.warmup * batches.steps_per_epoch), self.total // 2)  # some decay is left
        self.mixed = config.data.mixup > 0 or config.data.cutmix > 0

        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.stats = torch.zeros(8, dtype=torch.float64, device=device)
        self.optimizer = make_optimizer(model, train, device)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.lr: Tensor = self.optimizer.param_groups[0]["lr"]
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.average = Average(model, self.parameters, train.ema) if train.ema else None

        if compiled:
            compile_blocks(model, deterministic=train.deterministic)
        self.forward: nn.Module = model
        if self.world > 1:
            ids = [device] if device.type == "cuda" else None
            self.forward = nn.parallel.DistributedDataParallel(model, device_ids=ids)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.draws = False  # whether a step draws from PyTorch's generator, as dropout does; known once prepared

    def prepare(self, stream: torch.cuda.Stream | None) -> None:
        """Compiles and captures as the mode asks, leaving the training state bit for bit as it was."""
        if self.mode == "eager":
            return
        before = {name: value.clone() for name, value in self.state().items()}
        generator = default_generator(self.device)
        drawn = generator.get_offset() if self.device.type == "cuda" else 0
        for _ in range(WARMUP):
            self._once()
        self.load(before)
        self.draws = self.device.type == "cuda" and generator.get_offset() != drawn
        if self.mode == "graph":
            # Gradients are None when the capture begins, so that backward gives them memory of the graph's own pool.
            self.optimizer.zero_grad(set_to_none=True)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self._once()

    def __call__(self, step: int) -> None:
        """Enqueues one step. `step`, the host's own count, seeds dropout, so that a step draws the same anywhere."""
        default_generator(self.device).manual_seed(seeding.key(self.config.train.seed, "dropout", self.rank, step))
        self.replay()

    def replay(self) -> None:
        if self.graph is None:
            self._once()
        else:
            self.graph.replay()

    def _once(self) -> None:
        train = self.config.train
        x, labels_a, labels_b, lam = self.batches.next(self.step)
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, train.precision):
            logits = self.forward(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits, labels_a, reduction="none", label_smoothing=train.smoothing)
        if self.mixed:
            other = F.cross_entropy(logits, labels_b, reduction="none", label_smoothing=train.smoothing)
            losses = lam * losses + (1 - lam) * other
        loss = losses.mean()
        loss.backward()
        with torch.no_grad():
            finite = self._update(loss)
            guess = logits.argmax(1)
            correct = torch.where(guess == labels_a, lam, 0) + torch.where(guess == labels_b, 1 - lam, 0)
            self._count(finite, loss * len(labels_a), correct.sum(), len(labels_a))
            self.step.add_(1)

    def _update(self, loss: Tensor) -> Tensor:
        """Clips and steps unless something is not finite; returns whether all was."""
        train = self.config.train
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self.found_inf.copy_(~(loss.isfinite() & norm.isfinite()))
        if self.world > 1:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX)
        if train.clip:
            nn.utils.clip_grads_with_norm_(parameters, train.clip, norm)
        self.lr.copy_(learning_rate(self.step, peak=train.lr, warmup=self.warmup, total=self.total))
        self.optimizer.step()
        finite = self.found_inf == 0
        if self.average is not None:
            self.average.update(finite)
        return finite

    def _count(self, finite: Tensor, loss: Tensor, correct: Tensor, images: int) -> None:
        sums = torch.stack([loss.double(), correct.double(), torch.full_like(loss, images, dtype=torch.float64)])
        self.stats[: IMAGES + 1].add_(torch.where(finite, sums, 0))
        bad = (~finite).double()
        self.stats[BAD].add_(bad)
        self.stats[ROW].add_(1).mul_(bad)
        self.stats[LONGEST].copy_(torch.maximum(self.stats[LONGEST], self.stats[ROW]))

    def release(self) -> None:
        """Gives the model back as it came: without compiled blocks."""
        for module in _blocks(self.model) if self.compiled else []:
            module._compiled_call_impl = None  # type: ignore[assignment]

    def state(self) -> dict[str, Tensor]:
        """Everything training changes, by name; the tensors themselves, not copies."""
        state = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, p in self.parameters.items():
            state |= {f"optimizer.{name}.{kind}": value for kind, value in self.optimizer.state[p].items()}
        if self.average is not None:
            state |= {f"ema.{name}": value for name, value in self.average.parts.items()}
        return state | {"train.step": self.step, "train.stats": self.stats}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Writes such a state in place: captured addresses stay valid."""
        state = self.state()
        if state.keys() != tensors.keys():
            name = min(state.keys() ^ tensors.keys())
            raise ValueError(f"the checkpoint does not fit this run: {name} is in only one of them")
        for name, value in state.items():
            if value.shape != tensors[name].shape:
                found = list(tensors[name].shape)
                raise ValueError(f"the checkpoint does not fit this run: {name} is {found}, not {list(value.shape)}")
            value.copy_(tensors[name])


class Average:
    """Exponential moving average of the weights, with a model that reads it.

    The average is one flat tensor, so that keeping it untouched after a non-finite step is one `where`.
    """

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], decay: float) -> None:
        self.decay, self.sources = decay, list(parameters.values())
        self.flat = self._gather()
        ends = list(itertools.accumulate(p.numel() for p in self.sources))
        self.parts = {
            name: self.flat[end - p.numel() : end].view(p.shape)
            for (name, p), end in zip(parameters.items(), ends, strict=True)
        }
        self.model = copy.deepcopy(model).eval()
        for name, p in self.model.named_parameters():
            if name in self.parts:
                p.data = self.parts[name]
        for mine, live in zip(self.model.modules(), model.modules(), strict=True):
            mine._buffers = live._buffers

    def _gather(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.sources])

    def update(self, finite: Tensor) -> None:
        self.flat.copy_(torch.where(finite, self.flat.lerp(self._gather(), 1 - self.decay), self.flat))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What is compiled each on its own: the blocks, or the whole model where it has none."""
    blocks = getattr(model, "blocks", None)
    return list(blocks) if isinstance(blocks, (nn.ModuleList, nn.Sequential)) else [model]


def compile_blocks(model: nn.Module, *, deterministic: bool) -> None:
    """Compiles in place; blocks of equal code and shapes share one compilation."""
    options = {"deterministic": True} if deterministic else None
    for module in _blocks(model):
        module.compile(dynamic=False, options=options)


@contextlib.contextmanager
def room_for_compiled_models() -> Iterator[None]:
    """Lets PyTorch keep the compiled blocks of more than eight different models; it would run the ninth uncompiled."""
    import torch._dynamo.config as dynamo

    with dynamo.patch(recompile_limit=dynamo.accumulated_recompile_limit):  # type: ignore[attr-defined]
        yield


def resolve_mode(mode: str, device: torch.device, world: int) -> tuple[str, str | None]:
    """The mode to run for the mode asked, and why it is another one where that needs telling."""
    if mode == "graph" and device.type != "cuda":
        raise ValueError(f"mode graph needs a CUDA device, got device {device}; use auto, eager or compiled")
    if mode != "auto" and (mode != "graph" or world == 1):
        return mode, None
    if device.type != "cuda":
        return "eager", None
    if world == 1:
        return "graph", None
    mode = "compiled" if can_compile(device) else "eager"
    return mode, f"several processes: the step runs {mode}, not as one captured graph"


def can_compile(device: torch.device) -> bool:
    """Whether compiled code for this device is at hand without further tools."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
