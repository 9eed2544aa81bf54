"""Scopes for what PyTorch keeps as global switches: TF32, deterministic kernels, the default random generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

DTYPES = {"bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}  # of parameters and images


@contextmanager
def numerics(*, tf32: bool, deterministic: bool) -> Iterator[None]:
    """TF32 as asked and, if asked, only kernels that repeat bit for bit; both as they were afterwards."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    fill: Any = torch.utils.deterministic
    precision = _legacy_precision()
    before = (matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    mode = torch.get_deterministic_debug_mode()
    filled = fill.fill_uninitialized_memory
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    if deterministic:
        torch.set_deterministic_debug_mode("error")  # at "warn" attention keeps its unrepeatable backward
        fill.fill_uninitialized_memory = False
    try:
        yield
    finally:
        # All interfaces are put back: PyTorch refuses to read one while it disagrees with the others.
        matmul.allow_tf32, cudnn.allow_tf32 = before[0] == "tf32", before[1] == "tf32"
        matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before
        if precision is not None and _legacy_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        torch.set_deterministic_debug_mode(mode)
        fill.fill_uninitialized_memory = filled


def _legacy_precision() -> str | None:
    """None where the newer interface was used alone, which PyTorch does not let the older one describe."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that dropout on this device draws from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


@contextmanager
def preserved_generator(device: torch.device) -> Iterator[None]:
    generator = default_generator(device)
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
