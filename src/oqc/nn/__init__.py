"""Modules: hosts, complements, the feed-forward network that joins them, and the readout."""

from oqc.nn.complements import KINDS, Complement
from oqc.nn.ffn import OQCFFN, fold_together
from oqc.nn.hosts import AFBO, GLU, MLP, Host, match_hidden
from oqc.nn.readout import PenultimateResidual

__all__ = [
    "AFBO", "GLU", "KINDS", "MLP", "OQCFFN", "Complement", "Host", "PenultimateResidual", "fold_together",
    "match_hidden",
]  # fmt: skip
