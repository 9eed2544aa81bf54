"""Compiles what the kernels' launches need for a GPU that is not here: `python compiling.py 89 101376`.

A program for a process of its own, since Triton reads once whether it interprets. Every launch of some networks at the
sizes that take most room goes through Triton's compiler and NVIDIA's assembler for the compute capability given, with
so many bytes of shared memory a program, and is not run. Prints a line of JSON a kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from oqc import ops
from oqc.config import FFN, Model, Train
from oqc.models import DeepViT
from oqc.nn import OQCFFN
from oqc.ops import device, triton_complement, triton_fold
from oqc.train.optim import make_optimizer


class Absent:
    """A driver that knows which GPU is meant, and has none."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(run: Any) -> Any:
    """A kernel's launch, up to where it would start."""

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        print(json.dumps({"kernel": self.__name__, "shared": kernel.metadata.shared}), flush=True)
        return kernel

    return launch


def network(complement: str, rank: int, dtype: torch.dtype) -> None:
    module = OQCFFN(264, 160, host="mlp", complement=complement, rank=rank, backend="triton", dtype=dtype)
    x = torch.randn(2, 9, 264, dtype=dtype, requires_grad=True)
    module(x).sum().backward()


def blocks(complement: str, rank: int, depth: int = 1, width: int = 256) -> None:
    """Blocks of Deep-ViT in training, in inference, and their parameters' update."""
    ffn = FFN(host="afbo", complement=complement, rank=rank, hidden=160)
    model = DeepViT(Model(width=width, heads=8, depth=depth, readout=False, ffn=ffn), backend="triton")
    images = torch.randn(1, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(images).float().sum().backward()
        with torch.no_grad():
            model(images)
    optimizer = make_optimizer(model, Train(backend="triton"), torch.device("cpu"))
    optimizer.norm()
    optimizer.step()


def main(capability: int, shared_memory: int) -> None:
    driver.set_active(Absent(capability))
    JITFunction.run = compile_only(JITFunction.run)
    device.INTERPRETED = True  # so that tensors of a CPU go to the kernels
    triton_fold.shared_memory = triton_complement.shared_memory = lambda device: shared_memory
    blocks("lowrank", 128)
    blocks("lowrank", 56, depth=2)
    blocks("lowrank", 56, depth=2, width=128)
    blocks("dynamic", 120, depth=2)
    blocks("full", 128, depth=2)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        network("full", 128, dtype)
    network("dynamic", 120, torch.bfloat16)
    network("full", 64, torch.float32)
    for size in (32, 64):
        qkv = torch.randn(1, 128, 3 * size, dtype=torch.bfloat16, requires_grad=True)
        ops.self_attention(qkv, 1, backend="triton").sum().backward()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
