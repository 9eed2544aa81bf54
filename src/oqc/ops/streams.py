"""Work that waits for nothing, put beside work that does: two branches of a captured CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

_SIDES: dict[torch.device, torch.cuda.Stream] = {}


def fork(x: Tensor) -> torch.cuda.Stream | None:
    """A stream that goes on from x's current one, while that is being captured into a CUDA graph; None elsewhere, where
    launches take longer than what could run beside them. Autograd runs a backward on the stream of its forward."""
    if torch.compiler.is_compiling() or not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    if x.device not in _SIDES:
        _SIDES[x.device] = torch.cuda.Stream(x.device)
    side = _SIDES[x.device]
    side.wait_stream(torch.cuda.current_stream(x.device))
    return side


def join(side: torch.cuda.Stream | None) -> None:
    """What is captured from here on waits for what was captured on the side."""
    if side is not None:
        torch.cuda.current_stream(side.device).wait_stream(side)
