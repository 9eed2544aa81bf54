"""What the operators of `operators` compute, in plain PyTorch: for a CPU without Triton's interpreter, and for second
derivatives. Arguments are the operators' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from oqc.ops.rankspace import full_coefficients
from oqc.ops.reference import main_feature, orthogonalize, quadratic, upcast

GATE_COLUMNS = 16  # of proj: the gate's logit and zeros, so that rows stay aligned
GATE_PARTS = 4  # numbers that add up to the gradient of a gate


class Form(NamedTuple):
    """What an operator is told besides its tensors."""

    rows: int = 0
    columns: int = 0
    prefix: int = 0
    rank: int = 0
    space: str = "rank"  # "host": no complement
    normalise: bool = True
    gate: str = "scalar"  # "beta": its logit; "token": a value per token; "logit": logits in a column of proj
    shared: bool = False  # u and v are the first R channels of the host's maps
    eps: float = 1e-6
    save: bool = True  # whether a backward may follow


def split(proj: Tensor, hidden: int, form: Form) -> tuple[Any, ...]:
    """Views of proj's columns: a, c, u, v (None for a host alone) and the gate's columns (None without)."""
    a, c = proj[:, :hidden], proj[:, hidden : 2 * hidden]
    logit = proj[:, -GATE_COLUMNS:] if form.gate == "logit" else None
    if form.space == "host":
        return a, c, None, None, logit
    if form.shared:
        return a, c, a[:, : form.rank], c[:, : form.rank], logit
    first, padded = 2 * hidden, form.rank + -form.rank % 8
    return a, c, proj[:, first : first + padded], proj[:, first + padded : first + 2 * padded], logit


def padded_rank(form: Form) -> int:
    return form.rank + -form.rank % 8


def width_of(stack: Tensor, form: Form) -> int:
    """D: S has as many rows and, with a complement, those of P and of G."""
    return stack.shape[0] - padded_rank(form) * {"host": 0, "none": 1}.get(form.space, 2)


def fold(weight: Tensor, lift: Tensor, project: Tensor | None, space: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """S = [W M; P 0; 0 G] (full: O^T for P; no orthogonalisation: no such rows), with M = W O, G = O^T O and the rank
    padded by zeros, of layers along the first axis: in full precision, and in `dtype`."""
    extra = -lift.shape[2] % 8
    wide = upcast(F.pad(lift, (0, extra)))  # [layers, H, padded R]
    rows = [torch.cat([upcast(weight), upcast(weight) @ wide], 2)]
    if space != "none":
        project = wide.mT if project is None else upcast(F.pad(project, (0, 0, 0, extra)))
        rows.append(F.pad(project, (0, wide.shape[2])))
    rows.append(F.pad(wide.mT @ wide, (wide.shape[1], 0)))
    exact = torch.cat(rows, 1)
    return exact, exact.to(dtype, copy=True)


def afbo(*args: Any) -> Tensor:
    x, weight_in, bias_in, tap_a, bias_a, tap_c, bias_c, stack, exact, bias, gate = args[:11]
    form = Form(*args[11:])
    a, c, u, v, logit = split(F.linear(x, weight_in, cast(bias_in, x)), tap_a.shape[0], form)
    b = F.gelu(_spatial(a, tap_a, bias_a, form)) * _spatial(c, tap_c, bias_c, form)
    if form.space == "host":
        return F.linear(b, stack, cast(bias, x))
    value = gate if logit is None else torch.sigmoid(upcast(logit[:, 0]))
    if form.gate == "beta":
        value = torch.sigmoid(upcast(gate))
    return complement(b, u, v, value, stack, exact, bias, *form)


def _spatial(a: Tensor, tap: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    tokens = a.unflatten(0, (-1, form.prefix + form.rows * form.columns))  # [B, N, H]
    grid = tokens[:, form.prefix :].unflatten(1, (form.rows, form.columns)).permute(0, 3, 1, 2)
    mapped = F.conv2d(grid, tap.to(a.dtype), cast(bias, a), padding=1, groups=tap.shape[0])
    return torch.cat([tokens[:, : form.prefix], mapped.flatten(2).transpose(1, 2)], dim=1).flatten(0, 1)


def complement(*args: Any) -> Tensor:
    b, u, v, gate, _, exact, bias = args[:7]
    form, hidden = Form(*args[7:]), b.shape[1]
    stack, gram = exact.to(b.dtype), exact[-padded_rank(form) :, hidden:]
    width = width_of(stack, form)
    q = quadratic(u[:, : form.rank], v[:, : form.rank], form.eps)
    gate = upcast(gate).unsqueeze(-1) if gate.dim() else upcast(gate)
    host = F.linear(b, stack[:width, :hidden])
    t = F.linear(upcast(b), upcast(stack[width : width + form.rank, :hidden]))  # P b, O^T b or nothing
    if form.space == "rank":
        q = orthogonalize(q, main_feature(t, form.eps), form.eps)
    energy = ((q @ gram[: form.rank, : form.rank]) * q).sum(-1, keepdim=True).clamp_min(0)
    if form.space == "hidden":
        power = upcast(b).square().sum(-1, keepdim=True)
        kappa, z = full_coefficients(q, t, power, energy, gate, hidden=hidden, eps=form.eps)
        host = (upcast(host) * (1 + kappa)).to(b.dtype)
    else:
        z = gate * (torch.rsqrt(energy / hidden + form.eps) * q if form.normalise else q)
    y = host + F.linear(z.to(b.dtype), stack[:width, hidden : hidden + form.rank])
    return y if bias is None else y + bias.to(y.dtype)


def cast(item: Tensor | None, like: Tensor) -> Tensor | None:
    return None if item is None else item.to(like.dtype)


def gradients(
    function: Callable[..., Any], upstream: Any, inputs: Sequence[Tensor | None], rest: Sequence[Any]
) -> tuple[Tensor, ...]:
    """The gradient of every input, an empty one for None. Works inside an operator, where autograd is off."""

    def of_given(*tensors: Tensor) -> Any:
        left = iter(tensors)
        return function(*[None if item is None else next(left) for item in inputs], *rest)

    given = [item for item in inputs if item is not None]
    found = iter(torch.func.vjp(of_given, *given)[1](upstream))
    return tuple(given[0].new_empty(0) if item is None else next(found).clone() for item in inputs)


def differentiable_gradients(
    function: Callable[..., Any], upstream: Any, inputs: Sequence[Tensor | None], rest: Sequence[Any]
) -> list[Tensor | None]:
    """The same for those that require one, in a form that can be differentiated again."""
    wanted = [item for item in inputs if item is not None and item.requires_grad]
    outputs = function(*inputs, *rest)
    found = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=True, allow_unused=True))
    return [next(found) if item is not None and item.requires_grad else None for item in inputs]
