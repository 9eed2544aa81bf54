"""Verified data sets, packed once, and batches made of them on the device."""

from oqc.data.batches import Batches, eval_batches
from oqc.data.dataset import Dataset, Split, load

__all__ = ["Batches", "Dataset", "Split", "eval_batches", "load"]
