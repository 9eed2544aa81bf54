"""Launches every kernel, forward and backward, at small awkward shapes: a program for NVIDIA's compute-sanitizer.

    for i in $(seq 0 9); do python benchmarks/sanitize.py --part $i/10 & done; wait
    python benchmarks/sanitize.py --tool memcheck

The first line only fills Triton's cache, which would take minutes in one process. The second runs this program under
the tool and writes results/parity/<tool>-<gpu>.txt: where it ran, which kernels ran, what the tool said. `--list`
prints the kernels alone. Without the allocator's cache every tensor is an allocation of its own, whose ends the tool
knows. `--tool racecheck` looks at shared memory. Without a GPU the kernels run under Triton's interpreter, if
TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oqc import ops
from oqc.config import FFN, Model, Train
from oqc.models import DeepViT
from oqc.nn import OQCFFN
from oqc.ops.device import on_kernels
from oqc.train.environment import environment
from oqc.train.optim import make_optimizer

HALF, SINGLE = torch.bfloat16, torch.float32
SMALL = {"hidden": 41, "rank": 5, "grid": (3, 5)}
LARGE = {"hidden": 96, "rank": 83, "grid": (2, 11)}  # other blocks, and a grid that is cut into strips
NETWORKS = [
    *(
        ("afbo", name, SMALL, HALF)
        for name in ("none", "full", "lowrank", "dynamic", "shared", "unprojected", "equation")
    ),
    *(("swiglu", name, SMALL, HALF) for name in ("full", "dynamic")),
    *(("mlp", name, SMALL, HALF) for name in ("full", "lowrank")),
    *(("other", name, SMALL, HALF) for name in ("full", "dynamic")),  # a host of which the kernels see b alone
    *(("afbo", name, SMALL, SINGLE) for name in ("full", "lowrank")),
    *(("afbo", name, LARGE, HALF) for name in ("full", "dynamic")),
    *(("mlp", name, {**SMALL, "width": 264}, HALF) for name in ("full", "lowrank")),  # the gradient of z in two loops
]
BLOCKS = (("lowrank", 5, 32), ("full", 13, 40), ("dynamic", 83, 40), ("dynamic", 30, 272))
KERNELS = (
    *("_spatial_forward", "_spatial_backward", "_fold_forward", "_fold_backward"),
    *("_coefficients", "_combination", "_rows", "_gradient_of_z", "_rounded", "_gradients"),
    *("_norm_forward", "_norm_backward"),
    *("_mix_forward", "_mix_backward", "_attention_forward", "_attention_backward", "_column_sums"),
    *("_adamw_squares", "_adamw_update", "_adamw_count"),
)


def network(device: torch.device, host: str, complement: str, size: dict[str, Any], dtype: torch.dtype) -> None:
    """A feed-forward network, forward and backward, over three images of a grid and one prefix token."""
    place = {"grid": size["grid"], "prefix_tokens": 1}
    kind = {"host": "mlp", "act_layer": nn.Tanh} if host == "other" else {"host": host}
    options = {**kind, "complement": complement, "rank": size["rank"], "backend": "triton", **place}
    width = size.get("width", 20)
    module = OQCFFN(width, size["hidden"], device=device, dtype=dtype, **options)
    x = torch.randn(3, 1 + size["grid"][0] * size["grid"][1], width, device=device, dtype=dtype, requires_grad=True)
    module(x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def block(device: torch.device, complement: str, rank: int, width: int) -> None:
    """A step of Deep-ViT of two blocks under autocast: a residual stream in float32, the norms of it, and AdamW."""
    ffn = FFN(host="afbo", complement=complement, rank=rank, hidden=97)
    model = DeepViT(Model(width=width, heads=2, depth=2, readout=False, ffn=ffn), backend="triton", device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = model(torch.randn(3, 3, 32, 32, device=device))
    y.float().square().sum().backward()
    optimizer = make_optimizer(model, Train(backend="triton"), device)
    assert optimizer.norm().isfinite()
    optimizer.step()


def attention(device: torch.device, tokens: int, heads: int, size: int) -> None:
    qkv = torch.randn(2, tokens, 3 * heads * size, device=device, dtype=torch.bfloat16, requires_grad=True)
    ops.self_attention(qkv, heads, backend="triton").square().sum().backward()


def sums(device: torch.device, rows: int, columns: int) -> None:
    from oqc.ops.triton_sums import column_sums

    column_sums(torch.randn(rows, columns, device=device))


def launches(device: torch.device) -> list[Callable[[], None]]:
    return [
        *(partial(network, device, *one) for one in NETWORKS),
        *(partial(block, device, *one) for one in BLOCKS),
        *(partial(attention, device, *one) for one in ((17, 3, 16), (64, 8, 32), (65, 2, 32), (1, 1, 64))),
        *(partial(sums, device, *one) for one in ((47, 33), (5001, 33))),
    ]


def under(tool: str, folder: Path) -> int:
    """Runs this program under the tool and records what it said; the tool's exit status."""
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer is not installed; it comes with NVIDIA's CUDA toolkit")
    here = environment(torch.device("cuda"))
    ran = subprocess.run([sys.executable, __file__, "--list"], stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise SystemExit(ran.stdout)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.txt"
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--log-file", str(log)]
        uncached = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        status = subprocess.run([*command, sys.executable, __file__], env=uncached).returncode
        said = log.read_text() if log.exists() else f"{tool} wrote nothing\n"
    parts = {"driver": here["driver"], **here["versions"], "commit": here["commit"]}
    place = ", ".join([here["gpu"], *(f"{name} {value}" for name, value in parts.items())])
    folder.mkdir(parents=True, exist_ok=True)
    name = here["gpu"].lower().replace(" ", "-")
    (folder / f"{tool}-{name}.txt").write_text(f"{place}\nlaunches of benchmarks/sanitize.py:\n{ran.stdout}{said}")
    print(said.splitlines()[-1])
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print our kernels that ran; 1 if one did not")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="every N-th launch alone, from the I-th on")
    parser.add_argument("--tool", help="memcheck, racecheck, initcheck or synccheck: run under it and record that")
    parser.add_argument("--out", type=Path, default=Path("results/parity"))
    args = parser.parse_args()
    if args.tool and args.part != "0/1":
        raise SystemExit("--tool runs every launch: leave out --part")
    if args.tool:
        return under(args.tool, args.out)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not on_kernels(torch.zeros(1, device=device)):
        raise SystemExit("no kernel runs here: it takes a GPU and Triton, or TRITON_INTERPRET=1")
    torch.manual_seed(0)
    number, count = map(int, args.part.split("/"))
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) if args.list else nullcontext() as profile:
        for work in launches(device)[number::count]:
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
    if profile is None:
        return 0
    ran = {event.key: event.count for event in profile.key_averages()}
    missing = [kernel for kernel in KERNELS if kernel not in ran]
    for name in sorted(ran.keys() & set(KERNELS)):
        print(f"{ran[name]:6d} x  {name}")
    if missing:
        print("did not run:", ", ".join(missing))
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
