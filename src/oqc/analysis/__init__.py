"""Probes that capture a model's tensors, and metrics on them."""

from oqc.analysis.geometry import geometry
from oqc.analysis.mechanism import METRICS, SEPARATION, mechanism, mechanism_on_test
from oqc.analysis.overlap import chance_level, overlap

__all__ = ["METRICS", "SEPARATION", "chance_level", "geometry", "mechanism", "mechanism_on_test", "overlap"]
