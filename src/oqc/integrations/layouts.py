"""How a feed-forward network of any library is laid out: which child maps up, which down, and what acts where.

A layout is guessed from a module's children (shapes, order, what they are) and then proved: a copy with random weights
must give the same output through the layout as through its own forward, in training and in evaluation. So no class has
to be known by name, and a module that does something else is left alone instead of being changed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oqc.ops import acts, is_plain
from oqc.ops.plain import ACTIVATIONS
from oqc.ops.reference import Map

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # for a forward that calls its activation as a function
    f"{name}()": ACTIVATIONS[name] for name in ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
}
Place = Literal["before", "between", "after"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names of a module's children, in the order in which its forward applies them; b is what `act` gives.

    One name in `maps` and `mix="plain"`: b = act(A x). Two names, or one map of twice the width, and
    `mix="gate_first"`: b = act(A x) * B x; `"gate_last"`: b = A x * act(B x).
    """

    maps: tuple[str, ...]
    mix: Literal["plain", "gate_first", "gate_last"] = "plain"
    act: str
    down: str | None  # None: the output projection is not in the module, which returns h itself
    before: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def enter(self, module: nn.Module, x: Tensor) -> Tensor:
        """What the maps read."""
        for name in self.before:
            x = module._modules[name](x)  # type: ignore[misc]
        return x

    def up(self, module: nn.Module) -> list[nn.Module]:
        return [module._modules[name] for name in self.maps]  # type: ignore[misc]

    def activation(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        act = module._modules.get(self.act)
        return FUNCTIONS[self.act] if act is None else act

    def split(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The maps, from what `up` gives: a packed one in its two halves."""
        return outputs if self.mix == "plain" or len(outputs) == 2 else outputs[0].chunk(2, dim=-1)

    def hidden(self, module: nn.Module, maps: tuple[Tensor, ...]) -> Tensor:
        """b, from the maps, which an activation may overwrite."""
        act = self.activation(module)
        if self.mix == "plain":
            return act(maps[0])
        return act(maps[0]) * maps[1] if self.mix == "gate_first" else maps[0] * act(maps[1])

    def project(self, module: nn.Module) -> Map:
        """The map from h on: the output projection itself, where it is just its weights and nothing acts between h and
        it right now. Any other is not handed on as a module, which accelerate's hooks would move to a device."""
        parts = module._modules
        acting = [parts[name] for name in self.between if acts(parts[name])]
        down = parts[self.down] if self.down is not None else None
        return _Chain([*acting, down]) if down is None or acting or not is_plain(down) else down

    def leave(self, module: nn.Module, y: Tensor) -> Tensor:
        for name in self.after:
            y = module._modules[name](y)  # type: ignore[misc]
        return y


class _Chain:
    """Modules one after the other; not an nn.Sequential, which costs more to make than to run."""

    def __init__(self, modules: list[nn.Module | None]) -> None:
        self.modules = modules

    def __call__(self, h: Tensor) -> Tensor:
        for module in self.modules:
            h = h if module is None else module(h)
        return h


def sizes(module: nn.Module, layout: Layout) -> tuple[int, int]:
    """Width D and hidden width H."""
    up = module.get_submodule(layout.maps[0])
    assert isinstance(up, nn.Linear)
    packed = len(layout.maps) == 1 and layout.mix != "plain"
    return up.in_features, up.out_features // 2 if packed else up.out_features


def candidates(module: nn.Module, split: bool = False) -> Iterator[Layout]:
    """Layouts that the children allow, the likeliest first. `split`: the output projection is another module's."""
    children = list(module.named_children())
    linears = [(name, child) for name, child in children if isinstance(child, nn.Linear)]
    others = [(name, child) for name, child in children if not isinstance(child, nn.Linear)]
    activations = [
        name for name, child in others if not isinstance(child, (nn.Dropout, nn.Identity)) and not _weighted(child)
    ]
    if len(activations) > 1 or any(next(child.children(), None) is not None for _, child in others):
        return
    rest = {name: child for name, child in others if name not in activations}
    order = [name for name, _ in children]
    for maps, down, packed in _linear_roles(linears, split):
        gated = packed or len(maps) == 2
        mixes: tuple[Literal["plain", "gate_first", "gate_last"], ...] = (
            ("gate_first", "gate_last") if gated else ("plain",)
        )
        for act, mix, places in itertools.product(
            activations or FUNCTIONS, mixes, _placements(rest, order, maps, down)
        ):
            yield Layout(maps=maps, mix=mix, act=act, down=down, **places)


def _linear_roles(
    linears: list[tuple[str, nn.Linear]], split: bool
) -> Iterator[tuple[tuple[str, ...], str | None, bool]]:
    """(maps, down, packed) for every way in which the linear layers go from D to H and back to D."""
    if split and len(linears) == 1:
        yield (linears[0][0],), None, False
    if len(linears) not in (2, 3):
        return
    for i in reversed(range(len(linears))):
        name, down = linears[i]
        ups = [pair for j, pair in enumerate(linears) if j != i]
        width, hidden = down.out_features, down.in_features
        shapes = {(up.in_features, up.out_features) for _, up in ups}
        names = tuple(up_name for up_name, _ in ups)
        if shapes == {(width, hidden)}:
            yield names, name, False
            if len(names) == 2:
                yield names[::-1], name, False
        elif len(ups) == 1 and shapes == {(width, 2 * hidden)}:
            yield names, name, True


def _placements(
    rest: dict[str, nn.Module], order: list[str], maps: tuple[str, ...], down: str | None
) -> Iterator[dict[str, Any]]:
    """Where dropouts, norms and identities stand: as registered, or as other common forwards have them."""
    first = min(order.index(name) for name in maps)
    last = order.index(down) if down is not None else len(order)

    def registered(name: str) -> tuple[Place, ...]:
        at = order.index(name)
        return ("before",) if at < first else ("between",) if at < last else ("after",)

    drop_ways: list[tuple[Place, ...] | None] = [None, ("between", "after"), ("between",), ("after",)]
    norm_ways: list[tuple[Place, ...] | None] = [None, ("between",), ("before",)]
    has_drop = any(isinstance(child, nn.Dropout) for child in rest.values())
    has_norm = any(_weighted(child) for child in rest.values())
    for drop, norm in itertools.product(drop_ways if has_drop else [None], norm_ways if has_norm else [None]):
        places: dict[str, list[str]] = {"before": [], "between": [], "after": []}
        for name, child in rest.items():
            way = drop if isinstance(child, nn.Dropout) else norm if _weighted(child) else None
            for place in way or registered(name):
                places[place].append(name)
        yield {place: tuple(names) for place, names in places.items()}


def _weighted(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def recognise(module: nn.Module, split: bool = False) -> Layout | None:
    """The layout that the module's own forward agrees with, if there is one."""
    options = candidates(module, split)
    first = next(options, None)
    if first is None:
        return None
    probe = _random_copy(module)
    return next((layout for layout in itertools.chain([first], options) if _agrees(probe, layout)), None)


def _random_copy(module: nn.Module) -> nn.Module:
    """On the CPU and in float64, with weights that hide nothing (no zeros, no ones), dropout and no hooks."""
    probe = copy.deepcopy(module)
    generator = torch.Generator("cpu").manual_seed(1)
    for part in probe.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
        if isinstance(part, nn.Dropout):
            part.p, part.inplace = 0.5, False
    if any(value.is_meta for value in itertools.chain(probe.parameters(), probe.buffers())):
        probe = probe.to_empty(device="cpu")
    probe = probe.cpu().double()
    with torch.no_grad():
        for value in probe.parameters():
            scale = value.shape[-1] ** -0.5 if value.dim() > 1 else 1.0
            value.copy_(scale * torch.randn(value.shape, generator=generator, device="cpu"))
    return probe


def _agrees(probe: nn.Module, layout: Layout) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, 3, sizes(probe, layout)[0], generator=generator, device="cpu", dtype=torch.float64)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for training in (False, True):
            probe.train(training)
            try:
                torch.default_generator.manual_seed(0)
                want = probe(x)
                torch.default_generator.manual_seed(0)
                given = layout.enter(probe, x)
                b = layout.hidden(probe, layout.split(tuple([up(given) for up in layout.up(probe)])))
                got = layout.leave(probe, layout.project(probe)(b))
            except (TypeError, RuntimeError, ValueError, AttributeError):  # a forward of another kind
                return False
            if not isinstance(want, Tensor) or want.shape != got.shape or not torch.allclose(want, got, rtol=1e-5):
                return False
    return True
