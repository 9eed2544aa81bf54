"""Orthogonal Quadratic Complements for vision transformer feed-forward networks (arXiv 2604.09709)."""

from oqc.config import FFN, Data, Model, Run, Train
from oqc.integrations import inject, load, mlp_layer, remove, save, trainable
from oqc.models import DeepViT, create_model, list_models
from oqc.nn import OQCFFN, PenultimateResidual

__version__ = "0.1.0"

__all__ = [
    "FFN",
    "OQCFFN",
    "Data",
    "DeepViT",
    "Model",
    "PenultimateResidual",
    "Run",
    "Train",
    "__version__",
    "create_model",
    "inject",
    "list_models",
    "load",
    "mlp_layer",
    "remove",
    "save",
    "trainable",
]
