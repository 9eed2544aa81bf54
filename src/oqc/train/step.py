"""One training step, the same code run eagerly, with compiled blocks, or replayed from one CUDA graph.

A step takes the batch of the step counter, runs forward, loss and backward, clips, lets AdamW and the moving average
update, and counts. Everything it needs to know per step is a tensor on the device, so the host waits for no value and,
where a graph is replayed, sends none (else AdamW's kernels are sent the gradients' addresses).

A step whose loss or gradient norm is not finite changes nothing but the counters: `found_inf` makes the AdamW kernel
return early and not count, and the moving average keeps its old value.

Clipping divides inside that kernel too (`grad_scale`, made for loss scaling): what `clip_grads_with_norm_` computes, to
rounding, without a pass over all gradients. In float64 it is that function itself, since the divisor is float32.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from oqc import seeding
from oqc.config import Run
from oqc.train.average import Average
from oqc.train.distributed import rank_and_world
from oqc.train.numerics import autocast, default_generator
from oqc.train.optim import make_optimizer, settle

WARMUP = 3  # steps before a capture: library handles, workspaces and compiled code come into being in these
LOSS, CORRECT, IMAGES, BAD, ROW, LONGEST, STOP, LOOK = range(8)  # places in `Step.stats`


class BatchSource(Protocol):
    """What `oqc.data.Batches` gives. One that has `compile(compiler)` is given one where blocks are compiled."""

    steps_per_epoch: int

    def start_epoch(self, epoch: int) -> None: ...
    def next(self, step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...


class Step:
    """The step of one run. `mode` is eager, compiled or graph; `compiled` says whether blocks are compiled, and with
    them the small work around them: what the model and the batches have of it, loss, learning rate and counters.

    `stats` (float64, on the device): summed loss, correct predictions and images since the last evaluation, then
    non-finite steps in all, in a row now, in a row at most; and two by which ranks agree on when to stop and to look.
    """

    def __init__(
        self, model: nn.Module, batches: BatchSource, config: Run, device: torch.device, *, mode: str, compiled: bool
    ) -> None:
        self.model, self.batches, self.config, self.device = model, batches, config, device
        self.mode, self.compiled = mode, compiled
        self.rank, self.world = rank_and_world()
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
        self.divisor: Tensor | None = None
        if train.clip and train.precision != "fp64":
            self.divisor = torch.ones((), dtype=torch.float32, device=device)
            self.optimizer.grad_scale = self.divisor  # type: ignore[attr-defined]
        self.average = Average(model, self.parameters, train.ema) if train.ema else None

        self.mean_loss, self.settle, self.count = mean_loss, settle, count
        if compiled:
            compile_blocks(model, deterministic=train.deterministic)
            self.mean_loss = compile_function(mean_loss, train.deterministic)
            self.settle = compile_function(settle, train.deterministic)
            self.count = compile_function(count, train.deterministic)
            if hasattr(batches, "compile"):
                batches.compile(functools.partial(compile_function, deterministic=train.deterministic))
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
        with kept_on_disk():
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
        labels = (labels_a, labels_b, lam)
        loss = self.mean_loss(logits, *labels, mixed=self.mixed, smoothing=train.smoothing)
        loss.backward()
        with torch.no_grad():
            loss, logits = loss.detach(), logits.detach()
            self._update(loss)
            self.count(self.stats, self.step, self.found_inf, loss, logits, *labels)

    def _update(self, loss: Tensor) -> None:
        """Clips and steps unless something is not finite."""
        train = self.config.train
        norm = self.optimizer.norm()
        schedule: dict[str, Any] = {"peak": train.lr, "warmup": self.warmup, "total": self.total}
        written = (self.lr, self.found_inf, self.divisor)
        self.settle(*written, self.step, loss, norm, clip=train.clip, **schedule)
        if self.world > 1:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX)
        if train.clip and self.divisor is None:
            nn.utils.clip_grads_with_norm_(self.parameters.values(), train.clip, norm)
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.found_inf == 0)

    def release(self) -> None:
        """Gives the model back as it came: with nothing compiled."""
        if self.compiled:
            release_blocks(self.model)

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


def mean_loss(
    logits: Tensor, labels_a: Tensor, labels_b: Tensor, lam: Tensor, *, mixed: bool, smoothing: float
) -> Tensor:
    losses = F.cross_entropy(logits, labels_a, reduction="none", label_smoothing=smoothing)
    if mixed:
        other = F.cross_entropy(logits, labels_b, reduction="none", label_smoothing=smoothing)
        losses = lam * losses + (1 - lam) * other
    return losses.mean()


def count(
    stats: Tensor,
    step: Tensor,
    found_inf: Tensor,
    loss: Tensor,
    logits: Tensor,
    labels_a: Tensor,
    labels_b: Tensor,
    lam: Tensor,
) -> None:
    """Adds one step to `Step.stats` and to the step counter."""
    guess, images, finite = logits.argmax(1), len(labels_a), found_inf == 0
    correct = torch.where(guess == labels_a, lam, 0) + torch.where(guess == labels_b, 1 - lam, 0)
    loss = loss * images
    sums = torch.stack([loss.double(), correct.sum().double(), torch.full_like(loss, images, dtype=torch.float64)])
    stats[: IMAGES + 1].add_(torch.where(finite, sums, 0))
    bad = (~finite).double()
    stats[BAD].add_(bad)
    stats[ROW].add_(1).mul_(bad)
    stats[LONGEST].copy_(torch.maximum(stats[LONGEST], stats[ROW]))
    step.add_(1)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What is compiled each on its own: the blocks, or the whole model where it has none."""
    blocks = getattr(model, "blocks", None)
    return list(blocks) if isinstance(blocks, (nn.ModuleList, nn.Sequential)) else [model]


def compile_blocks(model: nn.Module, *, deterministic: bool) -> None:
    """Compiles in place; blocks of equal code and shapes share one compilation.

    Beside its blocks a model may name methods in a class attribute `compilable`, which then run compiled as well.
    """
    for module in _blocks(model):
        module.compile(dynamic=False, options=_options(deterministic))
    for name in _beside_blocks(model):
        # A bound method of the class's compiled function: a deep copy of the model binds it to the copy.
        setattr(model, name, types.MethodType(compile_function(getattr(type(model), name), deterministic), model))


def release_blocks(model: nn.Module) -> None:
    """Undoes `compile_blocks`."""
    for module in _blocks(model):
        module._compiled_call_impl = None  # type: ignore[assignment]
    for name in _beside_blocks(model):
        vars(model).pop(name, None)


def _beside_blocks(model: nn.Module) -> tuple[str, ...]:
    return () if _blocks(model) == [model] else getattr(model, "compilable", ())


@functools.cache
def compile_function(function: Callable[..., Any], deterministic: bool) -> Callable[..., Any]:
    """One compiled function for all runs of a process, so that equal shapes are compiled once."""
    return torch.compile(function, dynamic=False, options=_options(deterministic))


def _options(deterministic: bool) -> dict[str, Any] | None:
    return {"deterministic": True} if deterministic else None


@contextlib.contextmanager
def room_for_compiled_models() -> Iterator[None]:
    """Lets PyTorch keep the compiled blocks of more than eight different models; it would run the ninth uncompiled."""
    import torch._dynamo.config as dynamo

    with dynamo.patch(recompile_limit=dynamo.accumulated_recompile_limit):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def kept_on_disk() -> Iterator[None]:
    """Lets PyTorch keep what it traces of the blocks, for the next process and for other models of the same blocks: by
    itself it keeps nothing with a Function of one's own, as `ops.norm` has. What changes in one is part of the key."""
    import torch._functorch.config as functorch

    name = "autograd_cache_allow_custom_autograd_functions"
    with functorch.patch(name, True) if hasattr(functorch, name) else contextlib.nullcontext():  # type: ignore[attr-defined]
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
