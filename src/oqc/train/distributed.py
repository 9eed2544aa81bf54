"""Processes started by torchrun: joining and leaving their group, and which of them this is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from oqc.train.environment import find_device


@contextmanager
def joined(device: str | None) -> Iterator[torch.device | str | None]:
    """Joins the other processes where torchrun started several, and gives this process its device.

    NCCL on GPUs, one each; gloo on the CPU. Alone it does nothing and gives `device` back.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    own = find_device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=own if cuda else None)
    try:
        yield own
    finally:
        dist.destroy_process_group()


def rank_and_world() -> tuple[int, int]:
    """Which process this is, and of how many."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
