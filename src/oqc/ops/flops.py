"""FLOPs of the fused operators, a multiply-add counted as two; import it before counting.

A module of its own because `torch.utils.flop_counter` imports triton, which `import oqc` must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from oqc.ops import operators  # noqa: F401  the operators must exist
from oqc.ops.layout import Branch, Form, Network, padded_rank, width_of


@register_flop_formula(torch.ops.oqc.fold)
def _fold_flops(weight: Any, lift: Any, *_: Any, **__: Any) -> int:
    layers, width, hidden = weight
    return 2 * layers * (width + lift[2]) * hidden * lift[2]


@register_flop_formula(torch.ops.oqc.fold_backward)
def _fold_backward_flops(dstack: Any, weight: Any, lift: Any, *_: Any, **__: Any) -> int:
    return 2 * _fold_flops(weight, lift)


@register_flop_formula(torch.ops.oqc.ffn)
def _ffn_flops(*args: Any, **_: Any) -> int:
    given: Any = Network(*args[: len(Network._fields)])
    spatial = 0 if given.tap_a is None else 18 * given.tap_a[0]
    return 2 * given.x[0] * (given.x[1] * given.weight_in[0] + spatial + _branch_flops(given.stack, args))


def _branch_flops(stack: Any, args: Sequence[Any]) -> int:
    """A token's products with the parts of S = [W M; P 0; 0 G], or with W alone. `args` end with a form."""
    form = Form(*args[-len(Form._fields) :])
    width, padded = width_of(stack[0], form), padded_rank(form)
    if form.space == "host":
        return width * stack[1]
    return width * stack[1] + (0 if form.space == "none" else padded * (stack[1] - padded)) + padded * padded


@register_flop_formula(torch.ops.oqc.ffn_backward)
def _ffn_backward_flops(dy: Any, *args: Any, **_: Any) -> int:
    return 2 * _ffn_flops(*args)


@register_flop_formula(torch.ops.oqc.complement)
def _complement_flops(*args: Any, **_: Any) -> int:
    given: Any = Branch(*args[: len(Branch._fields)])
    return 2 * given.b[0] * _branch_flops(given.stack, args)


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
