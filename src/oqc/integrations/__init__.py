"""Complements in models of other libraries: injection, saving, export. timm and the rest are imported where used."""

from oqc.integrations.folding import fold
from oqc.integrations.injection import inject, remove, trainable
from oqc.integrations.report import Report
from oqc.integrations.saving import load, save
from oqc.nn.ffn import mlp_layer

__all__ = ["Report", "fold", "inject", "load", "mlp_layer", "remove", "save", "trainable"]
