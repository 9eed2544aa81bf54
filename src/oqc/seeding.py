"""Random streams keyed by role, so that what one part draws never shifts what another part gets.

`generator` gives weights (host, branch) their own stream per parameter: with one seed, the host's weights are the same
whatever complement stands beside it. `uniform` is stateless: the number is a function of (seed, role, step, sample),
the same on every device, inside a captured graph, and after a resume.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def key(seed: int, *role: str | int) -> int:
    """A 63-bit number for this seed and role; close seeds give unrelated keys."""
    text = "/".join(str(part) for part in (seed, *role))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *role: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(key(seed, *role))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64: int64 counters to int64 hashes, with wrap-around arithmetic."""
    x = x * _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def uniform(stream: int, *counters: Tensor) -> Tensor:
    """Float32 numbers in [0, 1), one for each element of the (broadcast, int64) counters."""
    x = mix(counters[0] + stream)
    for counter in counters[1:]:
        x = mix(x + counter)
    return _shift(x, 40).to(torch.float32) * (1.0 / (1 << 24))
