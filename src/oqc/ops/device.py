"""What a device is to the kernels: whether they run on it, for which tensors, and how much of it there is."""

from __future__ import annotations

import contextlib
import importlib.util
import os

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_MAJOR = 8  # of the compute capability
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


_CAPABLE: dict[torch.device, bool] = {}  # of GPUs that were asked for: a step asks some hundred times


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run on this device: an NVIDIA GPU from Ampere on, or anything under Triton's interpreter.
    Older GPUs have too little shared memory and no products of bf16 or tf32; on others nobody has tried them."""
    if torch.compiler.is_compiling():
        return _capable(device)
    found = _CAPABLE.get(device)
    if found is None:
        found = _capable(device)
        if device.type == "cuda" and device.index is not None and torch.cuda.is_available():
            _CAPABLE[device] = found
    return found


def _capable(device: torch.device) -> bool:
    if device.type == "cuda" and torch.cuda.is_available():
        capable = torch.version.hip is None and torch.cuda.get_device_properties(device).major >= LEAST_MAJOR
    else:
        capable = INTERPRETED or device.type == "cuda"  # traced for a GPU that is elsewhere
    return HAS_TRITON and capable


def on_kernels(x: Tensor) -> bool:
    """Whether the operators run their kernels for such a tensor."""
    return x.dtype in DTYPES and runs_on(x.device)


def wanted(backend: str, x: Tensor) -> bool:
    """Whether kernels are to run for x: asked for or, on a GPU, left open; and not inside a torch.func transform or
    forward-mode differentiation, nor for a tensor made of others (sharded)."""
    if not (backend == "triton" or (backend == "auto" and x.is_cuda)) or not on_kernels(x):
        return False
    if torch.compiler.is_compiling():
        return True
    backward_only = torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0
    return backward_only and not is_traceable_wrapper_subclass(x)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def processors(device: torch.device) -> int:
    """How many multiprocessors run programs at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def shared_memory(device: torch.device) -> int:
    """The bytes of it that a program can have; under the interpreter as many as it wants."""
    if device.type != "cuda":
        return 1 << 30
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
