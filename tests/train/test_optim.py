from __future__ import annotations

import math

import pytest
import torch
from tiny_run import TinyNet
from torch import nn

from oqc.config import Train
from oqc.train.optim import learning_rate, make_optimizer, parameter_groups


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.2),
        (4, 1.0),
        (9, 2.0),  # the last step of the warmup is at the peak
        (10, 2.0),
        (35, 1.0 + math.cos(math.pi * 25 / 90)),
        (55, 1.0),
        (99, 1.0 + math.cos(math.pi * 89 / 90)),
        (100, 0.0),
    ],
)
def test_learning_rate_rises_linearly_then_falls_as_a_cosine(step: int, expected: float) -> None:
    found = learning_rate(torch.tensor(step), peak=2.0, warmup=10, total=100)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_learning_rate_without_warmup_starts_at_the_peak() -> None:
    assert learning_rate(torch.tensor(0), peak=0.5, warmup=0, total=10).item() == 0.5


def test_only_matrices_decay() -> None:
    model = TinyNet()
    model.embed.weight.requires_grad_(False)
    groups = parameter_groups(model, 0.05)
    names = {id(p): name for name, p in model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
    assert "embed.weight" not in decay
    assert decay["blocks.0.mix.weight"] == decay["head.weight"] == 0.05
    assert decay["blocks.0.mix.bias"] == decay["blocks.0.norm.weight"] == decay["embed.bias"] == 0.0


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter"):
        parameter_groups(nn.Identity(), 0.05)


def test_state_made_early_steps_like_plain_adamw() -> None:
    config = Train(weight_decay=0.1)
    ours, theirs = TinyNet(), TinyNet()
    optimizer = make_optimizer(ours, config, torch.device("cpu"))
    plain = torch.optim.AdamW(parameter_groups(theirs, 0.1), lr=1e-2, betas=config.betas, eps=config.adam_eps)
    optimizer.param_groups[0]["lr"].fill_(1e-2)
    x = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        for model, stepper in ((ours, optimizer), (theirs, plain)):
            stepper.zero_grad()
            model(x).square().sum().backward()
            stepper.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_hooks_run_once_whoever_else_uses_adamw() -> None:
    torch.optim.AdamW(TinyNet().parameters())  # wraps its class's step
    model = TinyNet()
    optimizer = make_optimizer(model, Train(backend="torch"), torch.device("cpu"))
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    before = model.head.weight.clone()
    model.head.weight.grad = torch.ones_like(before)
    optimizer.param_groups[0]["lr"].fill_(0.1)
    optimizer.step()
    assert seen == ["before", "after"]
    assert not torch.equal(model.head.weight, before)
