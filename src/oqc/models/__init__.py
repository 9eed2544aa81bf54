"""Backbones and their names."""

from oqc.models.deep_vit import DeepViT
from oqc.models.registry import create_model, list_models, model_config

__all__ = ["DeepViT", "create_model", "list_models", "model_config"]
