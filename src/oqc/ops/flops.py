"""FLOPs of the fused operators, a multiply-add counted as two; import it before counting.

A module of its own because `torch.utils.flop_counter` imports triton, which `import oqc` must not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from oqc.ops import operators  # noqa: F401  the operators must exist


@register_flop_formula(torch.ops.oqc.fold)
def _fold_flops(weight: Any, lift: Any, *_: Any, **__: Any) -> int:
    layers, width, hidden = weight
    return 2 * layers * (width + lift[2]) * hidden * lift[2]


@register_flop_formula(torch.ops.oqc.fold_backward)
def _fold_backward_flops(dstack: Any, weight: Any, lift: Any, *_: Any, **__: Any) -> int:
    return 2 * _fold_flops(weight, lift)


@register_flop_formula(torch.ops.oqc.afbo)
def _afbo_flops(x: Any, weight_in: Any, *args: Any, **_: Any) -> int:
    tap_a, stack, gram, space = args[1], args[5], args[6], args[13]
    return 2 * x[0] * (x[1] * weight_in[0] + 18 * tap_a[0] + _branch_flops(stack, gram, space))


def _branch_flops(stack: Any, gram: Any, space: str) -> int:
    """A token's products with the parts of S = [W M; P 0; 0 G]."""
    if gram is None:
        return stack[0] * stack[1]
    rank = gram[0]
    hidden, width = stack[1] - rank, stack[0] - rank * (1 if space == "none" else 2)
    return width * stack[1] + (0 if space == "none" else rank * hidden) + rank * rank


@register_flop_formula(torch.ops.oqc.afbo_backward)
def _afbo_backward_flops(dy: Any, *args: Any, **_: Any) -> int:
    return 2 * _afbo_flops(*args)


@register_flop_formula(torch.ops.oqc.complement)
def _complement_flops(b: Any, u: Any, v: Any, gate: Any, stack: Any, gram: Any, *args: Any, **_: Any) -> int:
    return 2 * b[0] * _branch_flops(stack, gram, args[5])


@register_flop_formula(torch.ops.oqc.complement_backward)
def _complement_backward_flops(dy: Any, *args: Any, **_: Any) -> int:
    return 2 * _complement_flops(*args)


@register_flop_formula(torch.ops.oqc.attention)
def _attention_flops(qkv: Any, heads: int, *_: Any, **__: Any) -> int:
    batch, tokens, packed = qkv
    return 4 * batch * tokens * tokens * (packed // 3)


@register_flop_formula(torch.ops.oqc.attention_backward)
def _attention_backward_flops(dout: Any, qkv: Any, heads: int, *_: Any, **__: Any) -> int:
    return 5 * _attention_flops(qkv, heads) // 2
