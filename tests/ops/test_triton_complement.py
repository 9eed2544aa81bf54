"""The complement's kernels on views inside larger buffers: what they must not touch stays as it was."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from oqc.ops import plain, triton_complement, triton_fold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CANARY = -7.0
BARS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(given: Tensor, expected: Tensor, bar: float) -> bool:
    return bool((given.double() - expected.double()).norm() <= bar * expected.double().norm() + 1e-12)


def check(
    tokens: int, hidden: int, rank: int, width: int, space: str, gate_kind: str, normalise: bool, dtype: torch.dtype
) -> None:
    """Forward and backward with u, v and their gradients in the middle of wider buffers, against plain PyTorch."""
    generator = torch.Generator().manual_seed(tokens + hidden)
    padded = rank + -rank % 8

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)

    weight, lift, project = (
        normal(width, hidden) / hidden**0.5,
        normal(hidden, rank),
        normal(rank, hidden) / hidden**0.5,
    )
    stack, merged, gram = plain.fold(weight, lift, project, space, torch.float64)
    stack, merged, gram = stack.to(dtype), merged.to(dtype), gram.float()
    buffer = torch.full((tokens + 2, 5 + 2 * padded + 16 + 3), torch.nan, device=DEVICE, dtype=dtype)
    gradient = torch.full_like(buffer, CANARY)
    columns = (slice(5, 5 + padded), slice(5 + padded, 5 + 2 * padded), slice(5 + 2 * padded, 5 + 2 * padded + 16))
    u, v, logit = (buffer[1:-1, part] for part in columns)
    du, dv, dlogit = (gradient[1:-1, part] for part in columns)
    for item, real in ((u, rank), (v, rank), (logit, 1)):
        item.zero_()
        item[:, :real] = normal(tokens, real)
    gate = {"scalar": normal().sigmoid().float(), "token": normal(tokens).sigmoid().float(), "logit": logit[:, 0]}[
        gate_kind
    ]
    b, bias, dy = normal(tokens, hidden).to(dtype), normal(width).float(), normal(tokens, width).to(dtype)
    kind = {"rank": rank, "space": space, "normalise": normalise, "gate_kind": gate_kind, "eps": 1e-6}
    results = triton_complement.forward(b, u, v, gate, stack, merged, gram, bias, **kind, save=True)
    y, z, t, power, host = results
    dgate = {"scalar": None, "token": torch.full((tokens,), torch.nan, device=DEVICE), "logit": dlogit}[gate_kind]
    stacked, dpower, dgram, total, dbias = triton_complement.backward(
        dy, host, u, v, gate, t, power, merged, gram, True, hidden=hidden, **kind, du=du, dv=dv, dgate=dgate
    )
    touched = torch.zeros_like(gradient, dtype=torch.bool)
    for part in columns[: 3 if gate_kind == "logit" else 2]:
        touched[1:-1, part] = True
    assert (gradient[~touched] == CANARY).all()
    assert all(item.isfinite().all() for item in (*results, gradient, stacked, dgram, total, dbias))
    assert not du[:, rank:].any()
    assert not dv[:, rank:].any()
    assert not z[:, rank:].any()

    value = gate.sigmoid() if gate_kind == "logit" else gate
    inputs = tuple(item.detach().double() for item in (b, u, v, value, stack, merged, gram, bias))
    form = plain.Form(rank=rank, space=space, normalise=normalise, gate=gate_kind)
    expected = plain.complement(*inputs, *form)
    exact = plain.gradients(plain.complement, dy.double(), inputs, form)
    db = stacked.double() @ stack.double()
    if dpower is not None:
        db += 2 * dpower.double()[:, None] * b.double()
    dvalue = total
    if dgate is not None:
        dvalue = dgate if gate_kind == "token" else dlogit[:, 0].double() / (value * (1 - value))
    found = (db, du, dv, dvalue, stacked.double().T @ b.double(), dy.double().T @ z.double(), dgram, dbias)
    assert close(y, expected, BARS[dtype])
    for name, given, right in zip(("b", "u", "v", "gate", "S", "M", "G", "bias"), found, exact, strict=True):
        if name != "G" or normalise:
            assert close(given, right, BARS[dtype] * (10 if name == "gate" else 1)), name


FORMS = [
    ("rank", "scalar", True),
    ("rank", "logit", True),
    ("rank", "token", False),
    ("hidden", "scalar", True),
    ("hidden", "token", True),
    ("none", "logit", True),
]


@pytest.mark.parametrize(("space", "gate_kind", "normalise"), FORMS)
@pytest.mark.parametrize(("tokens", "hidden", "rank", "width"), [(1, 16, 3, 5), (67, 40, 17, 33), (130, 33, 8, 16)])
def test_writes_its_own_and_nothing_else(
    tokens: int, hidden: int, rank: int, width: int, space: str, gate_kind: str, normalise: bool
) -> None:
    check(tokens, hidden, rank, width, space, gate_kind, normalise, torch.float32)


@pytest.mark.parametrize("space", ["rank", "hidden", "none"])
@pytest.mark.parametrize(("width", "hidden", "rank"), [(5, 16, 3), (33, 70, 17), (16, 33, 8)])
def test_fold(width: int, hidden: int, rank: int, space: str) -> None:
    shapes = ((width, hidden), (hidden, rank), (rank, hidden))
    weight, lift, project = (torch.randn(*shape, device=DEVICE) for shape in shapes)
    given = project if space == "rank" else None
    results = triton_fold.forward(weight, lift, given, space=space, dtype=torch.float32)
    doubles = [None if item is None else item.double() for item in (weight, lift, given)]
    upstream = tuple(torch.randn_like(item) for item in results)
    gradients = triton_fold.backward(*upstream, weight, lift, given, space=space)
    expected = plain.fold(*doubles, space, torch.float64)
    exact = plain.gradients(plain.fold, tuple(item.double() for item in upstream), doubles, (space, torch.float64))
    for one, other in zip((*results, *gradients), (*expected, *exact), strict=True):
        assert one.shape == other.shape
        assert close(one, other, 1e-5)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("space", "gate_kind", "normalise"), FORMS)
def test_awkward_shapes(space: str, gate_kind: str, normalise: bool, dtype: torch.dtype) -> None:
    """Over a hundred shapes: token counts around the blocks' edges, widths and ranks on and off the powers of two."""
    draw = random.Random(len(space) + len(gate_kind))
    for hidden, rank, width in draw.sample([(33, 3, 20), (664, 83, 256), (200, 56, 300)], 2):
        for tokens in draw.sample([1, 15, 31, 63, 64, 65, 127, 129, 500, 4097], 5):
            check(tokens, hidden, rank, width, space, gate_kind, normalise, dtype)
