"""Kernels compile for GPUs other than the one they were measured on, and fit their shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from oqc import ops
from oqc.ops import device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# By compute capability, the shared memory a program can have: A100; L4, RTX 40 (as A10, RTX 30); H100, H200; RTX 50.
GPUS = {80: 166912, 89: 101376, 90: 232448, 120: 101376}


@pytest.mark.parametrize("capability", GPUS)
def test_every_kernel_compiles_and_fits(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter does not see: the compiler's own errors, and tiles too large for a smaller GPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from sanitize import KERNELS

    command = [sys.executable, str(Path(__file__).with_name("compiling.py"))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [*command, str(capability), str(GPUS[capability])], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    most: dict[str, int] = {}
    for line in ran.stdout.splitlines():
        found = json.loads(line)
        most[found["kernel"]] = max(most.get(found["kernel"], 0), found["shared"])
    assert most.keys() == set(KERNELS)
    assert {name: size for name, size in most.items() if size > GPUS[capability]} == {}


@pytest.mark.parametrize(
    ("major", "hip", "runs"), [(9, None, True), (8, None, True), (7, None, False), (9, "6.4", False)]
)
def test_kernels_are_for_nvidia_from_ampere_on(
    major: int, hip: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(device, "_CAPABLE", {})
    gpu = torch.device("cuda", 0)
    assert device.runs_on(gpu) is runs
    for backend in ("auto", "triton"):
        assert ops.what_runs(backend, gpu) == ("triton" if runs else "torch")
    assert ops.what_runs("torch", gpu) == "torch"
