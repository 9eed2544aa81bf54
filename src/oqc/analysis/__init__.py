"""Probes that capture a model's tensors, and metrics on them."""

from oqc.analysis.overlap import chance_level, overlap

__all__ = ["chance_level", "overlap"]
