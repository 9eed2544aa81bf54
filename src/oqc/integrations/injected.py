"""The classes of feed-forward networks that have a complement by `inject`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from oqc.integrations.finding import input_of
from oqc.integrations.layouts import Layout
from oqc.nn import Complement


class Injected(nn.Module):
    """Mixin of the classes that `injected_class` makes: a feed-forward network of any library with a complement."""

    oqc_base: type[nn.Module]  # the class before
    oqc_input: str  # what its forward calls its input
    oqc_layout: Layout
    oqc_backend: str
    complement: Complement

    def forward(self, x: Tensor | None = None, *further: Any, **named: Any) -> Tensor:
        """By keyword, the input has the name that the class before has for it."""
        if x is None:
            x = named.pop(self.oqc_input, None)
        if x is None or further or named:
            given = (x is not None) + len(further) + len(named)
            raise ValueError(
                f"{self.oqc_base.__name__} with a complement takes its input, {self.oqc_input}, and nothing else, got"
                f" {given} arguments: leave it out with blocks=..."
            )
        layout, branch, backend = self.oqc_layout, self.complement, self.oqc_backend
        x, up, out = layout.enter(self, x), layout.up(self), layout.project(self)
        y = branch.network(x, up, layout.activation(self), out, backend, gate_last=layout.mix == "gate_last")
        if y is None:
            maps = layout.split(tuple([layer(x) for layer in up]))
            kept = branch.keep(maps)
            y = branch(x, kept, layout.hidden(self, maps), out, backend)
        return layout.leave(self, y)

    def intermediates(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The output by the literal equations, with b, q, m, q_perp, delta, gate and h by name."""
        layout = self.oqc_layout
        x = layout.enter(self, x)
        maps = layout.split(tuple([layer(x) for layer in layout.up(self)]))
        kept = self.complement.keep(maps)
        named = self.complement.intermediates(x, kept, layout.hidden(self, maps))
        return layout.leave(self, layout.project(self)(named["h"])), named

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles by the original class, since the subclass has no name to import it by."""
        return _new_instance, (self.oqc_base,), self.__dict__


class InjectedSequential(Injected):
    """One whose class before is a container, which is as long as it was: the branch is not among its items."""

    def _items(self) -> nn.Sequential:
        items = {name: module for name, module in self._modules.items() if name != "complement"}
        return nn.Sequential(OrderedDict(items))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._items())

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._items())

    def __getitem__(self, which: Any) -> nn.Module:
        return self._items()[which]

    def _fixed(self, *args: Any, **named: Any) -> Any:
        raise ValueError(f"{self.oqc_base.__name__} has a complement, which knows its layers: call oqc.remove first")

    append = extend = insert = pop = __delitem__ = __iadd__ = _fixed


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def injected_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a network's class; one for each, so that equal networks stay of one class."""
    if base not in _CLASSES:
        namespace = {"__module__": base.__module__, "oqc_base": base, "oqc_input": input_of(base)}
        mixin = InjectedSequential if issubclass(base, nn.Sequential) else Injected
        _CLASSES[base] = type(f"{base.__name__}WithComplement", (mixin, base), namespace)
    return _CLASSES[base]


def _new_instance(base: type[nn.Module]) -> nn.Module:
    cls = injected_class(base)
    return cls.__new__(cls)
