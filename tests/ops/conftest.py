"""What the operators allocate starts as NaN in every test here, and with `guards` lies between canaries; what a test
draws is the same in every run."""

from collections.abc import Iterator

import pytest
import torch
from guards import Guards

from oqc.ops.device import on_kernels


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert on_kernels(torch.zeros(1, device=device)), "the kernels would not run: TRITON_INTERPRET came too late"
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Guards:
    return Guards(monkeypatch)
