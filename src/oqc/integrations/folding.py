"""Folding for inference: G = O^T O and M = W O of every block, made once instead of once a batch."""

from __future__ import annotations

import torch
from torch import nn

from oqc import ops
from oqc.integrations.freezing import freeze
from oqc.integrations.injected import Injected
from oqc.integrations.injection import complements
from oqc.integrations.wrappers import check_model
from oqc.nn import OQCFFN


@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Keeps G and M in every complement whose output projection is a plain linear map; freezes the model, which
    `oqc.remove` undoes, and puts it into evaluation mode.

    The outputs stay as they are up to rounding. Weights that change afterwards are not followed, but where the fused
    kernels run, which make both with every batch, in a launch beside others; a state dict that is loaded undoes the
    folding where it goes, and holds no G and M. Cast a model to half precision before folding, not after: G and M are
    kept in float32.
    """
    check_model(model)
    folded = False
    for _, module in complements(model):
        out = _output_projection(module)
        if out is not None:
            module.complement.fold(out)  # type: ignore[union-attr, operator]
            folded = True
    if not folded:
        raise ValueError(f"{type(model).__name__} has no complement that can be folded")
    freeze(model)
    return model.eval()


def _output_projection(module: nn.Module) -> nn.Linear | None:
    """W, where nothing but dropout ever stands between h and it."""
    if isinstance(module, OQCFFN):
        out, between = module.host.fc2, [module.host.norm]
    else:
        assert isinstance(module, Injected)
        layout = module.oqc_layout
        if layout.down is None:
            return None
        out = module.get_submodule(layout.down)  # type: ignore[assignment]
        between = [module.get_submodule(name) for name in layout.between]
    quiet = all(isinstance(part, (nn.Identity, nn.Dropout)) for part in between)
    return out if quiet and ops.is_plain(out, module.complement.lift, module.complement.project) else None  # type: ignore[union-attr]
