from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_run import poison, tiny_config, tiny_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from oqc.train.numerics import numerics
from oqc.train.step import BAD, IMAGES, LONGEST, ROW, compile_blocks, resolve_mode


def snapshot(step: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in step.state().items() if not name.startswith("train.")}


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_non_finite_step_leaves_everything_bitwise_untouched(clip: float) -> None:
    trainer = tiny_trainer(tiny_config(ema=0.9, clip=clip))
    poison(trainer, [3, 4])
    with torch.no_grad():
        trainer.model.head.bias[0] = -0.0
    for number in range(6):
        before = snapshot(trainer.step)
        trainer.step(number)
        same = {
            n: torch.equal(v.view(torch.int32), before[n].view(torch.int32)) for n, v in snapshot(trainer.step).items()
        }
        assert all(same.values()) if number in (3, 4) else not any(same.values()), (number, same)
    stats = trainer.step.stats.tolist()
    assert (stats[BAD], stats[ROW], stats[LONGEST]) == (2, 0, 2)
    assert stats[IMAGES] == 4 * 8
    assert trainer.step.step.item() == 6
    assert {int(s["step"]) for s in trainer.step.optimizer.state.values()} == {4}


def test_an_infinite_gradient_with_a_finite_loss_is_caught() -> None:
    trainer = tiny_trainer()
    trainer.model.head.weight.register_hook(lambda grad: grad * torch.inf)
    before = snapshot(trainer.step)
    trainer.step(0)
    assert all(torch.equal(value, before[name]) for name, value in snapshot(trainer.step).items())
    assert trainer.step.stats[BAD] == 1


def test_step_equals_the_formula_written_out() -> None:
    config = tiny_config({"mixup": 0.4}, smoothing=0.1, clip=0.05, weight_decay=0.3, precision="fp64")
    trainer, twin = tiny_trainer(config), tiny_trainer(config)
    x, a, b, lam = twin.step.batches.next(torch.tensor(0))
    logits = twin.model(x)
    losses = [F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1) for labels in (a, b)]
    (lam * losses[0] + (1 - lam) * losses[1]).mean().backward()
    norm = nn.utils.clip_grad_norm_(twin.model.parameters(), 0.05)
    assert norm > 0.05
    lr = 1e-2 / 8  # first of eight warmup steps
    trainer.step(0)
    for ours, theirs in zip(trainer.model.parameters(), twin.model.parameters(), strict=True):
        assert theirs.grad is not None
        decay = 0.3 if theirs.ndim > 1 else 0.0
        expected = theirs.detach() * (1 - lr * decay) - lr * theirs.grad / (theirs.grad.abs() + 1e-8)
        torch.testing.assert_close(ours.detach(), expected, rtol=0, atol=1e-9)  # the device's lr is float32


def test_average_follows_the_weights() -> None:
    trainer = tiny_trainer(tiny_config(ema=0.75))
    expected = trainer.model.head.weight.detach().clone()
    for number in range(3):
        trainer.step(number)
        expected = 0.75 * expected + 0.25 * trainer.model.head.weight.detach()
    assert trainer.evaluated is not trainer.model
    torch.testing.assert_close(trainer.evaluated.head.weight.detach(), expected)


def test_dropout_depends_on_the_step_alone() -> None:
    one, two = tiny_trainer(drop=0.3), tiny_trainer(drop=0.3)
    for number in range(5):
        one.step(number)
        torch.rand(7)  # somebody else draws
        two.step(number)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_fit_leaves_the_generator_and_the_switches_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny_trainer(tiny_config(epochs=1), drop=0.3).fit()
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()


def test_numerics_are_scoped() -> None:
    def switches() -> tuple[object, ...]:
        return (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.conv.fp32_precision,
            torch.backends.cudnn.rnn.fp32_precision,
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before = switches()
    for tf32 in (False, True):
        with numerics(tf32=tf32, deterministic=True):
            assert torch.backends.cuda.matmul.allow_tf32 is tf32
            assert torch.backends.cudnn.allow_tf32 is tf32
            assert torch.are_deterministic_algorithms_enabled()
        assert switches() == before


def test_equal_blocks_compile_once() -> None:
    trainer = tiny_trainer()
    graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    for block in trainer.model.blocks:
        block.compile(backend=count, dynamic=False)
    trainer.step(0)
    trainer.step(1)
    assert graphs == 1
    trainer.evaluators["test"].start()
    assert graphs == 1  # evaluation runs uncompiled


@pytest.mark.slow
def test_compiled_agrees_with_eager_and_gives_the_model_back() -> None:
    eager = tiny_trainer(tiny_config(mode="eager", precision="fp64"))
    compiled = tiny_trainer(tiny_config(mode="compiled", precision="fp64"))
    a, b = eager.fit(), compiled.fit()
    assert [row["test_accuracy"] for row in a.history] == [row["test_accuracy"] for row in b.history]
    for p, q in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-9)
    assert all(block._compiled_call_impl is None for block in compiled.model.blocks)


def test_a_model_without_blocks_is_compiled_whole() -> None:
    model = nn.Linear(2, 2)
    compile_blocks(model, deterministic=True)
    assert model._compiled_call_impl is not None


def test_modes() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_mode("auto", cpu, 1) == ("eager", None)
    assert resolve_mode("auto", gpu, 1) == ("graph", None)
    assert resolve_mode("compiled", cpu, 2) == ("compiled", None)
    mode, note = resolve_mode("graph", gpu, 2)
    assert mode in ("compiled", "eager")
    assert note is not None
    with pytest.raises(ValueError, match="CUDA"):
        resolve_mode("graph", cpu, 1)
