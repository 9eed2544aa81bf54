import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(1, 1), (47, 300), (320, 5), (321, 129), (5000, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_column_sums(shape, dtype, guards):
    from oqc.ops.triton_sums import column_sums

    wide = torch.randn(shape[0], shape[1] + 3, device=DEVICE).to(dtype)
    x = wide[:, : shape[1]]  # rows further apart than they are long
    got, want = column_sums(x), x.double().sum(0)
    guards.check()
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)
    assert torch.equal(got, column_sums(x))
