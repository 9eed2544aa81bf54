"""Complements: the quadratic branch beside a host, in all the paper's forms.

One class; a `Kind` says where it is orthogonal to the host, how it is gated and what it shares. The gate starts are
ours where the paper is silent (docs/deviations.md).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oqc.config import COMPLEMENTS, check_choice
from oqc.ops.reference import Space


@dataclass(frozen=True, kw_only=True)
class Kind:
    space: Space = "rank"
    gate: Literal["scalar", "token", "one"] = "scalar"
    gate_init: float = -2.0  # sigmoid(-2) = 0.12
    gate_std: float = 0.0
    normalise: bool = True  # Eq. 9's RMSNorm
    shared: bool = False  # u and v are the host's own maps


KINDS: dict[str, Kind] = {
    "full": Kind(space="hidden"),
    "lowrank": Kind(),
    "static": Kind(gate_init=0.0, gate_std=0.01),
    "dynamic": Kind(gate="token"),
    # the paper's ablations
    "shared": Kind(shared=True),
    "unprojected": Kind(space="none", gate_init=0.0, gate_std=0.01),
    "ungated": Kind(gate="one"),
    "equation": Kind(normalise=False),  # Eq. 7 as printed: full OQC's equation, in rank space
}
assert (*KINDS,) == COMPLEMENTS[1:]


class Complement(nn.Module):
    """The branch's parameters: u, v [D -> R], project P [H -> R], lift O [R -> H], none with a bias; and the gate."""

    def __init__(
        self,
        name: str,
        width: int,
        hidden: int,
        rank: int,
        *,
        gate_init: float | None = None,
        eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_choice("complement", name, KINDS)
        if not 1 <= rank <= hidden:
            raise ValueError(f"rank must be from 1 to the hidden width {hidden}, got {rank}")
        factory = {"device": device or torch.get_default_device(), "dtype": dtype}
        self.name, self.kind, self.rank, self.eps = name, KINDS[name], rank, eps
        self.gate_init = self.kind.gate_init if gate_init is None else gate_init
        if not self.kind.shared:
            self.u = _linear(width, rank, **factory)
            self.v = _linear(width, rank, **factory)
        self.project = _linear(hidden, rank, **factory) if self.kind.space == "rank" else None
        self.lift = _linear(rank, hidden, **factory)
        self.beta = nn.Parameter(torch.empty((), **factory)) if self.kind.gate == "scalar" else None
        self.gate_map = _linear(width, 1, bias=True, **factory) if self.kind.gate == "token" else None
        self.init_weights()

    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """The branch's start. Without a generator, one is keyed by the state of PyTorch's own and leaves that
        untouched, so adding a complement does not shift the random numbers that the rest of a model draws."""
        if self.lift.weight.is_meta:
            return
        generator = generator or _side_stream(self.lift.weight.device)
        maps = [] if self.kind.shared else [self.u, self.v]
        for layer in (*maps, self.project, self.lift):
            if layer is not None:
                nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
        if self.beta is not None:
            nn.init.normal_(self.beta, self.gate_init, self.kind.gate_std, generator=generator)
        if self.gate_map is not None:
            nn.init.zeros_(self.gate_map.weight)
            nn.init.constant_(self.gate_map.bias, self.gate_init)

    def branches(self, x: Tensor, maps: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """u(x) and v(x), Eq. 2; shared: the first R channels of the host's two maps (of its one map, twice)."""
        if self.kind.shared:
            return maps[0][..., : self.rank], maps[-1][..., : self.rank]
        return self.u(x), self.v(x)

    def gate(self, x: Tensor) -> Tensor:
        """The mixing coefficient in (0, 1): [] for a scalar, [..., 1] for one a token."""
        if self.gate_map is not None:
            return torch.sigmoid(self.gate_map(x).float() if x.dtype != torch.float64 else self.gate_map(x))
        if self.beta is not None:
            return torch.sigmoid(self.beta)
        return torch.ones((), device=x.device, dtype=self.lift.weight.dtype)

    def extra_repr(self) -> str:
        return f"{self.name!r}, rank={self.rank}"


def _linear(inputs: int, outputs: int, *, bias: bool = False, **factory: Any) -> nn.Linear:
    """A layer without PyTorch's default start, which would draw from the global generator."""
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, **factory)


def _side_stream(device: torch.device) -> torch.Generator:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    digest = hashlib.sha256(state.numpy().tobytes()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
