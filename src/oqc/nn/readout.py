"""The penultimate-residual readout (PR)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oqc.ops import reference


class PenultimateResidual(nn.Module):
    """z = h_L + sigmoid(gamma) h_{L-1}, Eq. 12, on the block outputs before the final norm; gamma starts at 0."""

    def __init__(self, *, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))  # FSDP2 refuses scalars

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gamma)

    def forward(self, last: Tensor, penultimate: Tensor) -> Tensor:
        return reference.readout(last, penultimate, self.gamma)
