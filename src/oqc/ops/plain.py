"""What the operators of `operators` compute, in plain PyTorch: for a CPU without Triton's interpreter, and for second
derivatives. Arguments are the operators' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oqc.ops.layout import Branch, Form, Network, cut, gate_columns, hidden_of, maps_of, padded_rank, split, width_of
from oqc.ops.rankspace import full_coefficients
from oqc.ops.reference import main_feature, orthogonalize, quadratic, upcast


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


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # which stand between a map and b
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "identity": _identity,
}


def ffn(*args: Any) -> Tensor:
    given, form = cut(args, Network, Form)
    y = _ffn(given, form)
    return y if given.residual is None else given.residual + y


def _ffn(given: Any, form: Form) -> Tensor:
    x, weight_in, bias_in, tap_a, bias_a, tap_c, bias_c, stack, exact, bias, gate, *_ = given
    a, c, u, v, logit = split(F.linear(x, weight_in, cast(bias_in, x)), hidden_of(stack, form), form)
    if form.mix == "afbo":
        b = F.gelu(_spatial(a, tap_a, bias_a, form)) * _spatial(c, tap_c, bias_c, form)
    else:
        b = ACTIVATIONS[form.mix](a) if c is None else ACTIVATIONS[form.mix](a) * c
    if form.space == "host":
        return F.linear(b, stack, cast(bias, x))
    value = gate if logit is None else torch.sigmoid(upcast(logit[:, 0]))
    if form.gate_kind == "beta":
        value = torch.sigmoid(upcast(gate))
    return complement(b, u, v, value, stack, exact, bias, *form)


def _spatial(a: Tensor, tap: Tensor, bias: Tensor | None, form: Form) -> Tensor:
    tokens = a.unflatten(0, (-1, form.prefix + form.rows * form.columns))  # [B, N, H]
    grid = tokens[:, form.prefix :].unflatten(1, (form.rows, form.columns)).permute(0, 3, 1, 2)
    mapped = F.conv2d(grid, tap.to(a.dtype), cast(bias, a), padding=1, groups=tap.shape[0])
    return torch.cat([tokens[:, : form.prefix], mapped.flatten(2).transpose(1, 2)], dim=1).flatten(0, 1)


def complement(*args: Any) -> Tensor:
    (b, u, v, gate, _, exact, bias), form = cut(args, Branch, Form)
    hidden = b.shape[1]
    stack, gram = exact.to(b.dtype), exact[-padded_rank(form) :, hidden:]
    width = width_of(stack.shape[0], form)
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


def ffn_backward(dy: Tensor, inputs: Network, form: Form) -> tuple[Tensor, ...]:
    """What the operator of that name returns."""
    dx, dweight, dbias_in, *taps, dstack, dexact, dbias, dgate, _, _, _ = gradients(ffn, dy, inputs, form)
    parts, sums = [], maps_of(form) * hidden_of(inputs.stack, form)
    if form.mix == "afbo":
        none = dx.new_zeros(sums // 2)  # of a bias that is not there
        parts = [none if item is None else g.flatten() for g, item in zip(taps, inputs.taps, strict=True)]
    parts.append(dbias_in[:sums] if len(dbias_in) else dx.new_zeros(sums))
    if form.gate_kind == "logit":
        dgate = dbias_in[-gate_columns(form.rank, form.shared)] if len(dbias_in) else dx.new_zeros(())
    if form.space == "host":
        return dx, dweight, torch.cat(parts), dstack, dbias
    return dx, dweight, torch.cat(parts), *ends_of(dexact, dbias, dgate)


def ends_of(dexact: Tensor, dbias: Tensor, dgate: Tensor) -> tuple[Tensor, Tensor]:
    """dS with dbias as one more column, and the gate's gradient as the one part of itself."""
    column = F.pad(dbias.to(dexact.dtype), (0, dexact.shape[0] - len(dbias)))
    return torch.cat([dexact, column[:, None]], 1), dgate.sum().view(1).to(dexact.dtype)


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
