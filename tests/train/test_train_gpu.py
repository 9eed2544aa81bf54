from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import poison, run_until, tiny_data
from torch import Tensor

from oqc.config import FFN, Data, Model, Run, Train
from oqc.data import Batches, Dataset, Split
from oqc.models import create_model, model_config
from oqc.ops import fused
from oqc.train import Trainer, replay_rate, train_many
from oqc.train.checkpoint import parameter_hash
from oqc.train.step import BAD, LONGEST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODEL = Model(image_size=4, patch_size=1, channels=1, num_classes=4, width=64, depth=3, heads=2)
STEPS = 50


def config(drop: float = 0.0, **train: Any) -> Run:
    """With dropout the feed-forward networks take the literal path: something stands before their last layer."""
    ffn = FFN(complement="lowrank", rank=8, drop=drop)
    defaults: dict[str, Any] = {"epochs": 10, "batch": 8, "warmup": 1.0, "ema": 0.99, "smoothing": 0.1}
    data = Data(name="tiny", crop=1, cutout=2, mixup=0.4, cutmix=1.0)
    return Run(model=dataclasses.replace(MODEL, ffn=ffn), data=data, train=Train(**defaults | train))


def make(run: Run, folder: Path | None = None, **options: Any) -> Trainer:
    model = create_model(run.model, seed=run.train.seed, backend=run.train.backend)
    return Trainer(model, tiny_data(val=16), run, folder, device="cuda", **options)


def state_after(trainer: Trainer, steps: int) -> dict[str, Tensor]:
    run_until(trainer, steps, 15)
    return {name: value.clone() for name, value in trainer.step.state().items()}


def same_bits(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    assert one.keys() == two.keys()
    return [
        name
        for name in one
        if not torch.equal(one[name].view(-1).view(torch.uint8), two[name].view(-1).view(torch.uint8))
    ]


@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_graph_equals_eager_bit_for_bit(precision: str, drop: float, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    ffn_afbo = fused.ffn_afbo
    monkeypatch.setattr(fused, "ffn_afbo", lambda *args, **named: calls.append(1) or ffn_afbo(*args, **named))
    eager = state_after(make(config(drop, mode="eager", precision=precision)), STEPS)
    assert (len(calls) >= 3 * STEPS) is (drop == 0)  # the kernels are what trains
    graph = state_after(make(config(drop, mode="graph", precision=precision), compile_blocks=False), STEPS)
    assert same_bits(eager, graph) == []


@pytest.mark.slow
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_graph_of_compiled_blocks_equals_compiled_bit_for_bit(drop: float) -> None:
    compiled = state_after(make(config(drop, mode="compiled")), STEPS)
    graph = state_after(make(config(drop, mode="graph"), compile_blocks=True), STEPS)
    assert same_bits(compiled, graph) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["compiled", "graph"])
def test_compiled_batches_are_the_cpus_bit_for_bit(mode: str) -> None:
    """What the step itself was given, epoch after epoch, its images read where a replay leaves them."""
    torch._dynamo.reset()
    run = config(mode=mode)
    run = dataclasses.replace(run, data=Data(name="tiny", crop=1, cutout=2))
    trainer, given = make(run, compile_blocks=True), []
    sound = trainer.step.batches.next
    trainer.step.batches.next = lambda step: given.append(sound(step)) or given[-1]  # type: ignore[method-assign]
    cpu = Batches(tiny_data().train, tiny_data(), run.data, batch=8, seed=run.train.seed, device="cpu")
    trainer.prepare()
    for number in range(20):
        with trainer.scope():
            if number % trainer.per_epoch == 0:
                trainer.step.batches.start_epoch(number // trainer.per_epoch)
                cpu.start_epoch(number // trainer.per_epoch)
            trainer.step(number)
        torch.cuda.synchronize()
        names = ("x", "labels_a", "labels_b", "lam")
        found = {name: part.cpu() for name, part in zip(names, given[-1], strict=True)}
        expected = dict(zip(names, cpu.next(torch.tensor(number)), strict=True))
        assert same_bits(found, expected) == [], number
    trainer.step.release()


def made_data(images: int, size: int, classes: int) -> Dataset:
    """Noise with random labels."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, size, size), generator=generator, dtype=torch.uint8)
    split = Split(pixels, torch.randint(0, classes, (images,), generator=generator))
    half = (0.5, 0.5, 0.5)
    return Dataset("made", tuple(map(str, range(classes))), half, half, split, None, split, "made")


@pytest.mark.slow
def test_two_runs_of_200_steps_give_one_hash() -> None:
    """The paper's low-rank model at its own size and batch, fused, compiled and captured."""
    model = model_config("deep_vit_afbo_lowrank_r56")
    train = Train(epochs=50, eval_every=50, mode="graph", backend="triton")
    run = Run(model=model, data=Data(name="made"), train=train)
    data = made_data(4 * train.batch, model.image_size, model.num_classes)
    ends = [
        Trainer(create_model(model, seed=0, backend="triton"), data, run, device="cuda").fit().parameter_hash
        for _ in range(2)
    ]
    assert ends[0] == ends[1]
    assert ends[0] != parameter_hash(create_model(model, seed=0))


def test_capture_and_measurement_leave_the_state_alone() -> None:
    trainer = make(config(mode="graph"), compile_blocks=False)
    before = {name: value.clone() for name, value in trainer.step.state().items()}
    trainer.prepare()
    assert replay_rate([trainer], 5) > 0
    assert same_bits(before, trainer.step.state()) == []


def test_evaluation_in_a_graph_counts_each_image_once() -> None:
    eager, graph = make(config(mode="eager")), make(config(mode="graph"), compile_blocks=False)
    for trainer in (eager, graph):
        trainer.prepare()
    found = []
    for trainer in (eager, graph):
        with trainer.scope():
            found.append([evaluator.start().item() for evaluator in trainer.evaluators.values()])
    assert found[0] == found[1]


def test_nan_guard_inside_the_graph() -> None:
    trainer = make(config(mode="graph"), compile_blocks=False)
    poison(trainer, [3, 4])
    trainer.prepare()
    for number in range(6):
        before = {n: v.clone() for n, v in trainer.step.state().items() if not n.startswith("train.")}
        torch.cuda.synchronize()
        with trainer.scope():
            trainer.step(number)
        torch.cuda.synchronize()
        after = {n: v for n, v in trainer.step.state().items() if n in before}
        assert (same_bits(before, after) == []) is (number in (3, 4))
    assert (trainer.step.stats[BAD].item(), trainer.step.stats[LONGEST].item()) == (2, 2)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_steps_do_not_wait_for_the_device(mode: str) -> None:
    trainer = make(config(mode=mode), compile_blocks=False)
    trainer.prepare()
    with trainer.scope():
        trainer.step(0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for number in range(1, 8):
                trainer.step.batches.start_epoch(number)
                trainer.step(number)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drop", [0.0, 0.1])
@pytest.mark.parametrize("at_once", [3, "auto"])
def test_seeds_side_by_side_equal_alone(at_once: int | str, drop: float, tmp_path: Path) -> None:
    """With dropout they run one after another, since captured graphs share the generator's seed."""
    runs = [config(mode="graph", epochs=4, seed=seed, drop=drop) for seed in range(3)]
    alone = [make(run, compile_blocks=False).fit() for run in runs]
    makers = [lambda run=run: make(run, tmp_path / str(run.train.seed), compile_blocks=False) for run in runs]
    together = train_many(makers, at_once)
    assert [s.parameter_hash for s in together] == [s.parameter_hash for s in alone]
    for one, two in zip(alone, together, strict=True):
        assert [row["test_accuracy"] for row in one.history] == [row["test_accuracy"] for row in two.history]


def test_resume_is_bit_exact_in_graph_mode(tmp_path: Path) -> None:
    run = config(mode="graph")
    whole = make(run, compile_blocks=False).fit()
    run_until(make(run, tmp_path / "run", compile_blocks=False), 21, 15)
    resumed = make(run, tmp_path / "run", compile_blocks=False, resume=True).fit()
    assert resumed.parameter_hash == whole.parameter_hash
