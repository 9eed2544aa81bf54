"""The spatial kernels on views inside larger buffers: what they must not touch stays as it was."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from fused_oracle import DEVICE
from guards import CANARY
from torch import Tensor
from torch.nn import functional as F

from oqc.ops import triton_spatial

# A sum over all tokens may all but cancel, while each of its terms has the error of its own few roundings, 1.2e-7 of
# it, and such errors add up as squares do. Three times that comes on top of what a sum is allowed.
ROUNDING = 3.6e-7


def inside(rows: int, columns: int, left: int, right: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A NaN-filled [rows, columns] view with canaries around it, and a mask of those in the whole buffer."""
    whole = torch.full((rows + 3, left + columns + right), CANARY, device=DEVICE, dtype=dtype)
    outer = torch.ones_like(whole, dtype=torch.bool)
    outer[1 : rows + 1, left : left + columns] = False
    view = whole[1 : rows + 1, left : left + columns].fill_(torch.nan)
    return view, outer


def whole(view: Tensor) -> Tensor:
    assert view._base is not None
    return view._base


def check(
    images: int, rows: int, columns: int, prefix: int, hidden: int, left: int, right: int, dtype: torch.dtype
) -> None:
    tokens = prefix + rows * columns
    generator = torch.Generator().manual_seed(images + 10 * hidden)
    power = hidden % 2 == 0  # with and without the gradient of |b|^2
    weights = [torch.randn(hidden, 1, 3, 3, generator=generator).to(DEVICE) for _ in range(2)]
    biases = [torch.randn(hidden, generator=generator).to(DEVICE) if columns % 2 else None for _ in range(2)]
    taps = (weights[0], biases[0], weights[1], biases[1])
    place = {"tokens": tokens, "grid": (rows, columns), "prefix": prefix}
    views = [inside(images * tokens, hidden, left, right, dtype) for _ in range(6)]
    (a, _), (c, _), (db, _), *outputs = views
    for view in (a, c, db):
        view.copy_(torch.randn(view.shape, generator=generator))
    (b, b_outer), (da, da_outer), (dc, dc_outer) = outputs
    dpower = torch.randn(images * tokens, generator=generator).to(DEVICE) if power else None
    triton_spatial.forward(a, c, taps, **place, out=b)
    flat = triton_spatial.backward(db, dpower, a, c, taps, **place, da=da, dc=dc)
    for view, outer in ((b, b_outer), (da, da_outer), (dc, dc_outer)):
        assert (whole(view)[outer] == CANARY).all()
        assert view.isfinite().all()

    exact = [item.detach().double().requires_grad_() for item in (a, c, *weights)]
    shifts = [None if item is None else item.double().requires_grad_() for item in biases]

    sides: list[Tensor] = []  # both maps on the grid

    def mapped(item: Tensor, tap: Tensor, bias: Tensor | None) -> Tensor:
        item = item.unflatten(0, (images, tokens))
        grid = item[:, prefix:].unflatten(1, (rows, columns)).permute(0, 3, 1, 2)
        sides.append(F.conv2d(grid, tap, bias, padding=1, groups=hidden).flatten(2).transpose(1, 2))
        sides[-1].retain_grad()
        return torch.cat([item[:, :prefix], sides[-1]], dim=1).flatten(0, 1)

    y = F.gelu(mapped(exact[0], exact[2], shifts[0])) * mapped(exact[1], exact[3], shifts[1])
    loss = (y * db.double()).sum()
    if dpower is not None:
        loss = loss + (y.square().sum(1) * dpower.double()).sum()
    loss.backward()
    parts = flat.split([9 * hidden, hidden, 9 * hidden, hidden, hidden, hidden])
    grads = [item.grad for item in exact]
    pairs = {"b": (b, y), "da": (da, grads[0]), "dc": (dc, grads[1]), "taps a": (parts[0], grads[2])}
    pairs |= {"taps c": (parts[2], grads[3]), "sum a": (parts[4], grads[0].sum(0))}
    pairs |= {"sum c": (parts[5], grads[1].sum(0))}
    terms = {"sum a": grads[0], "sum c": grads[1]}
    for name, part, shift, side in zip(("bias a", "bias c"), parts[1:4:2], shifts, sides, strict=True):
        if shift is not None:
            pairs[name], terms[name] = (part, shift.grad), side.grad.flatten(0, 1)
    for name, (given, expected) in pairs.items():
        allowed = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype] * expected.norm()
        allowed = allowed + ROUNDING * terms[name].norm() if name in terms else allowed
        assert (given.double().flatten() - expected.flatten()).norm() <= allowed, name


SMALL = [(1, 1, 1, 0, 1), (2, 3, 3, 1, 5), (1, 2, 7, 0, 33), (3, 1, 8, 2, 4), (1, 3, 9, 0, 40), (2, 2, 13, 1, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("images", "rows", "columns", "prefix", "hidden"), SMALL)
def test_writes_its_own_and_nothing_else(
    images: int, rows: int, columns: int, prefix: int, hidden: int, dtype: torch.dtype
) -> None:
    check(images, rows, columns, prefix, hidden, 3, 5, dtype)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "hidden"), [(1, 7), (3, 33), (7, 664), (8, 65), (9, 31), (14, 96), (17, 1), (31, 40)]
)
def test_awkward_shapes(columns: int, hidden: int) -> None:
    """Over a hundred shapes, with odd strides on either side."""
    choices = list(itertools.product([1, 2, 5, 33], [1, 2, 3, 8, 17], [0, 1, 4]))
    for i, (images, rows, prefix) in enumerate(random.Random(columns).sample(choices, 13)):
        dtype = torch.float32 if i % 2 else torch.bfloat16
        check(images, rows, columns, prefix, hidden, 3, 5, dtype)
