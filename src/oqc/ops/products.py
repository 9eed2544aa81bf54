"""Products whose sum runs over all tokens: the gradients of weights."""

from __future__ import annotations

import torch
from torch import Tensor

# For some shapes cuBLAS 12 and 13 split such a sum and drop what follows the last whole block of it:
# benchmarks/lost_tokens.py shows it, as does https://github.com/facebookexperimental/triton/pull/2767. So the rest is
# multiplied apart.
BLOCK = 64


def over_tokens(a: Tensor, b: Tensor, *, full: bool = True, out: Tensor | None = None) -> Tensor:
    """a^T b of a [T, m] and b [T, n], in their dtype or, `full`, in fp32: in half precision cuBLAS may add up parts of
    so long a sum in that precision."""
    half = a.dtype in (torch.bfloat16, torch.float16)
    whole = len(a) - len(a) % BLOCK
    if half and 0 < whole < len(a):
        found = over_tokens(a[:whole], b[:whole]).add_(over_tokens(a[whole:], b[whole:]))
        found = found if full else found.to(a.dtype)  # rounded once, after the sum
        return found if out is None else out.copy_(found)
    if half and full and a.is_cuda:
        return torch.mm(a.T, b, torch.float32) if out is None else torch.mm(a.T, b, torch.float32, out=out)
    found = (a.T @ b).float() if full else a.T @ b
    return found if out is None else out.copy_(found)
