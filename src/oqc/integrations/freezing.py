"""What `trainable` and `fold` freeze, remembered in the modules, so that it alone can be thawed."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

FROZEN = "_oqc_frozen"  # of a module: names of its own parameters that `freeze` froze


def freeze(model: nn.Module, kept: Collection[nn.Parameter] = ()) -> None:
    """Freezes all parameters but these."""
    spared = {id(parameter) for parameter in kept}
    asked = {id(p) for p in model.parameters() if p.requires_grad} - spared
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in asked:
                parameter.requires_grad_(False)
                vars(module).setdefault(FROZEN, set()).add(name)


def thaw(model: nn.Module) -> None:
    """Thaws what `freeze` froze; what the model or its user froze, as fixed positions are, stays so."""
    for module in model.modules():
        frozen: set[str] = vars(module).pop(FROZEN, set())
        for name, parameter in module.named_parameters(recurse=False):
            if name in frozen:
                parameter.requires_grad_()
