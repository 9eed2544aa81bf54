"""The device a run is on, and what its record says about the machine and the code (but not whose machine it is)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("oqc", "torch", "numpy", "triton", "safetensors", "timm")


def find_device(device: torch.device | str | None) -> torch.device:
    """The device asked for, with its number; None is the GPU where there is one."""
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or cuda:<number>, got {device!r}") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:<number>, got {device!r}")
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) >= count:
        raise ValueError(f"device is {found}, but PyTorch sees {count} CUDA devices here")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


def environment(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "command": [Path(sys.argv[0]).name.replace("__main__.py", "oqc"), *sys.argv[1:]],
        "commit": _commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        }
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """What OQC_COMMIT says, for a copy whose history did not come along; otherwise the commit of the checkout this
    package is imported from, with `+changes` if its files differ from it."""
    if os.environ.get("OQC_COMMIT"):
        return os.environ["OQC_COMMIT"]
    root = next((p for p in Path(__file__).resolve().parents if (p / "src" / "oqc").is_dir()), None)
    if root is None or not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changed = commit and _output("git", "-C", str(root), "status", "--porcelain", "--", "src")
    return f"{commit}+changes" if changed else commit


def _output(*command: str) -> str | None:
    """What a tool prints, or None where there is no such tool or it fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return result.stdout.strip() or None
