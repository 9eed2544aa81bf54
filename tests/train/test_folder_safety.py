"""What stands in a run's folder survives a start that fails, other data, and a second process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tiny_run import TinyNet, run_until, tiny_config, tiny_data, tiny_trainer

from oqc.train import Trainer
from oqc.train.environment import find_device
from oqc.train.numerics import numerics
from oqc.train.stopping import StopRequest


class Odd(TinyNet):
    """Gives one class too many."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(super().forward(x), (0, 1))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_model_that_does_not_fit_is_told_before_anything_is_written(tmp_path: Path) -> None:
    tiny_trainer(folder=tmp_path / "run").fit()
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=r"output for one image is \[1, 5\], but tiny has 4 classes"):
        Trainer(Odd(), tiny_data(), tiny_config(), tmp_path / "run", device="cpu", overwrite=True).fit()
    assert contents(tmp_path / "run") == before
    with pytest.raises(ValueError, match="output for one image"):
        Trainer(Odd(), tiny_data(), tiny_config(), tmp_path / "new", device="cpu").fit()
    assert not (tmp_path / "new").exists()


def test_resume_refuses_other_data(tmp_path: Path) -> None:
    run_until(tiny_trainer(folder=tmp_path / "run"), 5, 15)
    other = dataclasses.replace(tiny_data(), digest="other")
    with pytest.raises(ValueError, match="was trained on other data: tiny has digest other now, it had tiny then"):
        Trainer(TinyNet(), other, tiny_config(), tmp_path / "run", device="cpu", resume=True)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    first = tiny_trainer(folder=tmp_path / "run")
    steps = first.run(StopRequest())
    next(steps)
    with pytest.raises(ValueError, match=r"another process is training in .*run"):
        tiny_trainer(folder=tmp_path / "run", overwrite=True).fit()
    assert json.loads((tmp_path / "run" / "config.json").read_text())
    for _ in steps:
        pass
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("name", ["meta", "xpu", "cuda:99", "gpu"])
def test_devices_that_are_not_there_are_named(name: str) -> None:
    with pytest.raises(ValueError, match="device"):
        find_device(name)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_numerics_are_as_before_afterwards(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        with numerics(tf32=False, deterministic=True):
            pass
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
