from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_run import TinyNet, poison, tiny_config, tiny_trainer
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from oqc import ops
from oqc.config import Model
from oqc.data import Batches
from oqc.models import create_model
from oqc.ops import norm
from oqc.train.numerics import numerics
from oqc.train.optim import make_optimizer
from oqc.train.step import BAD, IMAGES, LONGEST, ROW, compile_blocks, kept_on_disk, release_blocks, resolve_mode


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


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_an_infinite_gradient_with_a_finite_loss_is_caught(clip: float) -> None:
    trainer = tiny_trainer(tiny_config(clip=clip))
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


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
def test_clipping_equals_pytorchs_to_rounding(clip: float) -> None:
    """The divisor takes one rounding more than the factor. A norm below `clip` divides by 1: the same bits."""
    config = tiny_config(clip=clip)
    trainer, twin = tiny_trainer(config), tiny_trainer(config)
    optimizer = make_optimizer(twin.model, config.train, twin.device)
    for number in range(4):
        trainer.step(number)
        optimizer.zero_grad()
        x, labels, *_ = twin.step.batches.next(torch.tensor(number))
        F.cross_entropy(twin.model(x), labels).backward()
        norm = nn.utils.clip_grad_norm_(twin.model.parameters(), clip or torch.inf)
        assert 0.05 < norm < 1e6
        optimizer.param_groups[0]["lr"].copy_(trainer.step.lr)
        optimizer.step()
        tolerance = 1e-6 if clip == 0.05 else 0
        for p, q in zip(trainer.model.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(p.grad, q.grad, rtol=10 * tolerance, atol=tolerance)


def test_the_optimizer_divides_where_float32_is_enough() -> None:
    assert tiny_trainer(tiny_config(clip=1.0)).step.divisor is not None
    for config in (tiny_config(clip=0.0), tiny_config(clip=1.0, precision="fp64")):
        step = tiny_trainer(config).step
        assert step.divisor is None
        assert getattr(step.optimizer, "grad_scale", None) is None


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
    torch._dynamo.reset()
    settings: dict[str, Any] = {"precision": "fp64", "ema": 0.9, "smoothing": 0.1}
    eager = tiny_trainer(tiny_config({"cutout": 2, "mixup": 0.3}, mode="eager", **settings))
    compiled = tiny_trainer(tiny_config({"cutout": 2, "mixup": 0.3}, mode="compiled", **settings))
    a, b = eager.fit(), compiled.fit()
    rows = [[{k: v for k, v in row.items() if "accuracy" in k} for row in one.history] for one in (a, b)]
    for own, other in zip(*rows, strict=True):  # mixup's shares of two labels add up in another order
        assert own == pytest.approx(other, rel=1e-7)
    for p, q in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-9)
    torch.testing.assert_close(eager.step.stats, compiled.step.stats, rtol=0, atol=1e-9)
    assert all(block._compiled_call_impl is None for block in compiled.model.blocks)
    assert vars(compiled.model).keys() == vars(eager.model).keys()
    graphs = counters["stats"]["unique_graphs"]
    tiny_trainer(tiny_config({"cutout": 2, "mixup": 0.3}, mode="compiled", seed=1, **settings)).fit()
    assert counters["stats"]["unique_graphs"] == graphs  # another run of the same kind compiles nothing


@pytest.mark.slow
def test_what_is_traced_of_a_block_is_kept_for_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks' norm has a Function of its own, for which PyTorch would trace each time anew."""
    from torch._inductor.utils import fresh_cache

    monkeypatch.setattr(norm, "wanted", lambda backend, x: True)
    layer, x = nn.LayerNorm(16), torch.randn(3, 16, requires_grad=True)
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache(), kept_on_disk(), torch.autocast("cpu", torch.bfloat16):
        s, n = torch.compile(lambda x: ops.residual_norm(x, None, layer))(x)
        (s.sin().sum() + n.float().square().sum()).backward()
    found = counters["aot_autograd"]
    assert (found["autograd_cache_saved"], found["autograd_cache_bypass"]) == (1, 0)


@pytest.mark.slow
def test_compiled_float32_steps_clip_and_skip_as_eager_ones() -> None:
    trainers = [tiny_trainer(tiny_config(mode=mode, clip=0.05, ema=0.9)) for mode in ("eager", "compiled")]
    for trainer in trainers:
        poison(trainer, [2])
    for number in range(5):
        for trainer in trainers:
            before = snapshot(trainer.step)
            trainer.step(number)
            same = [torch.equal(value, before[name]) for name, value in snapshot(trainer.step).items()]
            assert all(same) if number == 2 else not any(same)
    eager, compiled = trainers
    assert eager.step.stats[BAD] == compiled.step.stats[BAD] == 1
    assert eager.step.step == compiled.step.step == 5
    for p, q in zip(eager.model.parameters(), compiled.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    for trainer in trainers:
        trainer.step.release()


def test_named_methods_are_compiled_beside_the_blocks_and_given_back() -> None:
    model, plain = TinyNet(), TinyNet()
    x = torch.ones(2, 1, 4, 4)
    compile_blocks(model, deterministic=True)
    assert "read" in vars(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(model(x), plain(x))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            model.head.weight.zero_()
            model.head.bias.zero_()
        assert torch.equal(twin(x), plain(x))  # the copy reads its own weights
        assert not model(x).any()
    release_blocks(model)
    release_blocks(twin)
    assert vars(model).keys() == vars(twin).keys() == vars(plain).keys()


def test_deep_vit_names_methods_and_still_refuses_a_wrong_shape() -> None:
    model = create_model(
        Model(image_size=4, patch_size=2, channels=1, num_classes=4, width=8, depth=2, heads=2), seed=0
    )
    compile_blocks(model, deterministic=True)
    assert set(model.compilable) == {"tokens", "pool"} <= vars(model).keys()
    with pytest.raises(ValueError, match=r"must be \[B, 1, 4, 4\], got \[2, 1, 5, 5\]"):
        model(torch.zeros(2, 1, 5, 5))


def test_a_batch_source_without_compile_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Batches, "compile")
    with torch.compiler.set_stance("force_eager"):
        trainer = tiny_trainer(tiny_config(mode="compiled"))
        trainer.step(0)
    assert trainer.step.step == 1
    trainer.step.release()


def test_the_trainer_compiles_batches_where_it_compiles_blocks() -> None:
    for mode in ("eager", "compiled"):
        trainer = tiny_trainer(tiny_config(mode=mode))
        assert (trainer.step.batches._compiled_view is not None) is (mode == "compiled")
        trainer.step.release()


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
