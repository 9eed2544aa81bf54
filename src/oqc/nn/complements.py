"""Complements: the quadratic branch beside a host, in all the paper's forms.

One class; a `Kind` says where it is orthogonal to the host, how it is gated and what it shares. The gate starts are
ours where the paper is silent (docs/deviations.md). `init="identity"` puts a learned scale alpha, 0 at the start,
before the gate: h = b + alpha * gate * delta is then b, and alpha has a gradient at once.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from oqc import ops
from oqc.config import COMPLEMENTS, FFN, check_choice, check_finite, check_positive, whole
from oqc.ops.reference import Map, Space

INITS = ("paper", "identity")
_KEPT = (
    "the state dict holds nothing of a complement, which keeps the weights that it has, so the outputs are not those of"
    ' the model that was saved: to fine-tune that one, start the complement with init="identity"'
)


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
    """The branch's parameters: u, v [D -> R], project P [H -> R], lift O [R -> H], none with a bias; and the gate.

    A state dict that holds nothing of the branch leaves it as it is, also with `strict=True`, so that a checkpoint of
    the host alone loads, with a warning where the branch adds something; one that holds a part of it is an error. A
    branch on the meta device, or one that `to_empty` brought off it and nothing has started yet, is missing.
    """

    _empty = False  # whether `to_empty` gave the weights memory, and nothing has given them values since

    def __init__(
        self,
        name: str,
        width: int,
        hidden: int,
        rank: int,
        *,
        gate_init: float | None = None,
        init: str = "paper",
        eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_choice("complement", name, KINDS)
        check_choice("init", init, INITS)
        check_positive("eps", eps)
        check_dtype(dtype)
        rank, eps = whole("rank", rank), float(eps)
        check_rank(rank, hidden)
        check_finite("gate_init", gate_init)
        if gate_init is not None and KINDS[name].gate == "one":
            raise ValueError(f"gate_init is where a gate starts that is learned, and {name}'s is always 1")
        factory = {"device": torch.get_default_device() if device is None else device, "dtype": dtype}
        self.name, self.kind, self.rank, self.init, self.eps = name, KINDS[name], rank, init, eps
        self.gate_init = self.kind.gate_init if gate_init is None else float(gate_init)
        if not self.kind.shared:
            self.u = _linear(width, rank, **factory)
            self.v = _linear(width, rank, **factory)
        self.project = _linear(hidden, rank, **factory) if self.kind.space == "rank" else None
        self.lift = _linear(rank, hidden, **factory)
        # One-element vectors, not scalars, which FSDP2 refuses.
        self.beta = nn.Parameter(torch.empty(1, **factory)) if self.kind.gate == "scalar" else None
        self.alpha = nn.Parameter(torch.empty(1, **factory)) if init == "identity" else None
        self.gate_map = _linear(width, 1, bias=True, **factory) if self.kind.gate == "token" else None
        self.gram: Tensor | None
        self.merged: Tensor | None
        self.register_buffer("gram", None, persistent=False)  # G and M, only once folded
        self.register_buffer("merged", None, persistent=False)
        self.init_weights()

    def init_weights(self, generator: torch.Generator | None = None, *, host: Tensor | None = None) -> None:
        """The branch's start. Without a generator, one is keyed by the state of PyTorch's own and a weight of the host.
        That state stays, so adding a complement does not shift the random numbers that the rest of a model draws. Off
        the meta device, where nothing else draws between two branches, the key is drawn from it."""
        if self.lift.weight.is_meta:
            return
        device = self.lift.weight.device
        if generator is None:
            seed = int(torch.randint(2**62, (), device="cpu")) if self._empty else seed_of_now(device, host)
            generator = torch.Generator(device).manual_seed(seed)
        self._empty = False
        maps = [] if self.kind.shared else [self.u, self.v]
        for layer in (*maps, self.project, self.lift):
            if layer is not None:
                nn.init.trunc_normal_(layer.weight, std=0.02, generator=generator)
        if self.beta is not None:
            nn.init.normal_(self.beta, self.gate_init, self.kind.gate_std, generator=generator)
        if self.gate_map is not None:
            nn.init.zeros_(self.gate_map.weight)
            nn.init.constant_(self.gate_map.bias, self.gate_init)
        if self.alpha is not None:
            nn.init.zeros_(self.alpha)

    def forward(self, x: Tensor, maps: tuple[Tensor, ...], b: Tensor, out: Map, backend: str = "auto") -> Tensor:
        """out(b + gate * delta), for the host's input x, its maps of x, its hidden map b and its output projection."""
        kind, (u, v), gate = self.kind, self.branches(x, maps), self.gate(x)
        folded = self.merged is not None and not ops.fused.chosen(backend, b, self.rank)  # kernels make their own
        if folded and isinstance(out, nn.Linear) and ops.is_plain(out, self.lift, self.project):
            return ops.rankspace.output(
                b,
                u,
                v,
                gate,
                out.weight,
                out.bias,
                self.lift.weight,
                None if self.project is None else self.project.weight,
                space=kind.space,
                normalise=kind.normalise,
                eps=self.eps,
                gram=self.gram,
                merged=self.merged,
            )
        return ops.ffn_output(
            b,
            u,
            v,
            gate,
            out,
            self.lift,
            self.project,
            space=kind.space,
            normalise=kind.normalise,
            eps=self.eps,
            backend=backend,
        )

    def intermediates(self, x: Tensor, maps: tuple[Tensor, ...], b: Tensor) -> dict[str, Tensor]:
        """b, q, m, q_perp, delta, gate and h by name, by the literal equations; without those that a kind lacks."""
        kind, gate = self.kind, self.gate(x)
        parts = ops.reference.update(
            b,
            *self.branches(x, maps),
            self.lift,
            self.project,
            space=kind.space,
            normalise=kind.normalise,
            eps=self.eps,
        )
        named = {"b": b} | {name: value for name, value in parts._asdict().items() if value is not None}
        named["gate"] = torch.broadcast_to(gate, (*b.shape[:-1], 1))
        return named | {"h": ops.reference.inject(b, parts.delta, gate)}

    def fold(self, out: nn.Linear) -> None:
        """Keeps G = O^T O and M = W O from now on: for inference, where O and W no longer change."""
        lift = ops.reference.upcast(self.lift.weight.detach())
        self.gram = lift.T @ lift
        self.merged = ops.reference.upcast(out.weight.detach()) @ lift

    def keep(self, maps: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What `branches` reads of the host's maps, to be taken before its activation, which may work in place."""
        return tuple([one[..., : self.rank].clone() for one in maps]) if self.kind.shared else maps

    def branches(self, x: Tensor, maps: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """u(x) and v(x), Eq. 2; shared: the first R channels of the host's two maps (of its one map, twice)."""
        if self.kind.shared:
            return maps[0][..., : self.rank], maps[-1][..., : self.rank]
        return self.u(x), self.v(x)

    def network(
        self, x: Tensor, up: Sequence[nn.Module], act: object, out: object, backend: str, *, gate_last: bool = False
    ) -> Tensor | None:
        """out(b + gate * delta) with b = act(A x), or act(A x) * B x, by one operator; None where it does not run.

        `up` are the host's layers that read x: A, A and B, or one that packs both. It is for training all of them:
        joining the weights of all maps costs more than it spares without gradients, and frozen ones need none.
        """
        if not torch.is_grad_enabled() or self.merged is not None or not ops.fused.chosen(backend, x, self.rank):
            return None
        name, layers = ops.activation_in_use(act), cast(list[nn.Linear], [*up, out])
        if name is None or not self.fuses(x, *layers) or not all(layer.weight.requires_grad for layer in layers):
            return None
        *ups, down = layers
        maps: list[tuple[Tensor, Tensor | None]] = [(layer.weight, layer.bias) for layer in ups]
        if len(maps) == 1 and ups[0].out_features == 2 * down.in_features:
            (weight, bias) = maps[0]
            maps = list(zip(weight.chunk(2), (None, None) if bias is None else bias.chunk(2), strict=True))
        maps = maps[::-1] if gate_last else maps
        return ops.fused.ffn_mix(x, maps, down.weight, down.bias, act=name, **self.fused_options(x))

    def fuses(self, x: Tensor, *layers: object) -> bool:
        """Whether one operator can take these layers of the host, and the branch's."""
        if ops.has_hooks(self) or (self.alpha is not None and self.gate_map is not None):
            return False
        return ops.fits(x, *layers, *self.children())

    def fused_options(self, x: Tensor) -> dict[str, Any]:
        """The branch, as `ops.fused` takes it."""
        gate: dict[str, Any]
        if self.gate_map is not None:
            gate = {"gate": (self.gate_map.weight, self.gate_map.bias)}
        elif self.beta is not None and self.alpha is None:
            gate = {"beta": self.beta}
        else:
            gate = {"gate": self.gate(x)}
        return {
            **({} if self.kind.shared else {"u": self.u.weight, "v": self.v.weight}),
            **gate,
            "lift": self.lift.weight,
            "project": None if self.project is None else self.project.weight,
            "space": self.kind.space,
            "normalise": self.kind.normalise,
            "eps": self.eps,
        }

    def gate(self, x: Tensor) -> Tensor:
        """The mixing coefficient in (0, 1), times alpha if there is one: [] for a scalar, [..., 1] for one a token."""
        if self.gate_map is not None:
            gate = torch.sigmoid(self.gate_map(x).float() if x.dtype != torch.float64 else self.gate_map(x))
        elif self.beta is not None:
            gate = torch.sigmoid(self.beta.squeeze(0))
        else:
            gate = torch.ones((), device=x.device, dtype=self.lift.weight.dtype)
        return gate if self.alpha is None else self.alpha.squeeze(0) * gate

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if any(name.startswith(prefix) for name in state_dict):
            self._empty = False
        elif not (self._empty or self.lift.weight.is_meta):
            if not self._adds_nothing():
                warnings.warn(_KEPT, stacklevel=2)
            state_dict.update(self.state_dict(prefix=prefix))
        self.gram = self.merged = None  # of the old W and O
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> Complement:
        meta = self.lift.weight.is_meta
        super()._apply(fn, recurse)
        self._empty = self._empty or (meta and not self.lift.weight.is_meta)
        return self

    def _adds_nothing(self) -> bool:
        """Whether the host's output is the network's, as at the identity start."""
        return self.alpha is not None and not bool(self.alpha.detach().any())

    def extra_repr(self) -> str:
        return f"{self.name!r}, rank={self.rank}, init={self.init!r}"


def check_rank(rank: int, hidden: int, of: str = "") -> None:
    if not 1 <= rank <= hidden:
        default = ", which is the default: give a smaller rank" if rank == FFN.rank else ""
        raise ValueError(f"rank must be from 1 to the hidden width {hidden}{of}, got {rank}{default}")


def check_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a torch.dtype of floating point, got {dtype!r}")


def _linear(inputs: int, outputs: int, *, bias: bool = False, **factory: Any) -> nn.Linear:
    """A layer without PyTorch's default start, which would draw from the global generator."""
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, **factory)


def seed_of_now(device: torch.device, host: Tensor | None = None) -> int:
    """What follows from the state of PyTorch's generator, which is not moved, and from a weight of the host, so that
    branches differ that are added one by one."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    found = hashlib.sha256(state.numpy().tobytes())
    if host is not None and type(host.data) is Tensor and not host.is_meta:
        found.update(host.detach().flatten()[:64].double().cpu().numpy().tobytes())
    return int.from_bytes(found.digest()[:8], "little") >> 1
