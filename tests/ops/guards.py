"""Allocations between canaries, filled with NaN: a kernel that writes outside what it was given, or leaves a part of it
unwritten, is found out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

CANARY = -7.0
MARGIN = 256  # elements on either side; keeps the alignment of an ordinary allocation


class Guards:
    """While in place, `torch.empty`, `torch.empty_like` and `Tensor.new_empty` give guarded memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[tuple[Tensor, int]] = []
        self.count = 0
        monkeypatch.setattr(torch, "empty", self._empty)
        monkeypatch.setattr(torch, "empty_like", lambda x, **options: self._empty(x.shape, **_like(x) | options))
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *s, **options: self._empty(*s, **_like(x) | options))

    def _empty(self, *sizes: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        shape = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        count = math.prod(shape)
        whole = torch.full((count + 2 * MARGIN,), CANARY, dtype=dtype or torch.get_default_dtype(), device=device)
        if whole.is_floating_point():
            whole[MARGIN : MARGIN + count] = torch.nan
        self.buffers.append((whole, count))
        # Not a view of `whole` in autograd's eyes: an operator may return it.
        return torch.zeros(0, dtype=whole.dtype, device=device).set_(whole.untyped_storage(), MARGIN, shape)

    def check(self) -> None:
        """Every canary is as it was; forgets the buffers."""
        for whole, count in self.buffers:
            assert (whole[:MARGIN] == CANARY).all(), f"written before a buffer of {count}"
            assert (whole[MARGIN + count :] == CANARY).all(), f"written behind a buffer of {count}"
        self.count += len(self.buffers)
        self.buffers.clear()


def _like(x: Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}
