"""The fused operators as PyTorch knows them: implementation, gradient and shapes for tracing of each.

`oqc::afbo` is a whole AFBO network, with a complement or without; `oqc::complement` is what follows the hidden map of
any other host; `oqc::fold` makes what both need of the weights alone. An operator returns a fixed number of tensors:
what a form does not have is an empty one, and what stands behind y is for the backward. They branch on the device:
CUDA, or a CPU under Triton's interpreter, runs the kernels; anything else, float64 and second derivatives take the same
functions in plain PyTorch (`plain`). Triton is imported when a kernel first runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oqc.ops import plain
from oqc.ops.plain import GATE_COLUMNS, Form, cast, split

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

_AFBO = (
    "Tensor x, Tensor weight_in, Tensor? bias_in, Tensor tap_a, Tensor? bias_a, Tensor tap_c, Tensor? bias_c,"
    " Tensor stack, Tensor? merged, Tensor? gram, Tensor? bias, Tensor? gate"
)
_COMPLEMENT = "Tensor b, Tensor u, Tensor v, Tensor gate, Tensor stack, Tensor merged, Tensor gram, Tensor? bias"
_SAVED = "Tensor z, Tensor t, Tensor power, Tensor host"  # z, P b, |b|^2, W b
_FORM = (
    "int rows, int columns, int prefix, int rank, str space, bool normalise, str gate_kind, bool shared, float eps,"
    " bool save"
)
_WEIGHTS = "Tensor weight, Tensor lift, Tensor? project"


def on_kernels(x: Tensor) -> bool:
    """Whether the operators run their kernels for such a tensor."""
    return HAS_TRITON and (x.is_cuda or INTERPRETED) and x.dtype in DTYPES


def wanted(backend: str, x: Tensor) -> bool:
    """Whether kernels are to run for x: asked for or, on a GPU, left open; and not inside a torch.func transform."""
    if not (backend == "triton" or (backend == "auto" and x.is_cuda)) or not on_kernels(x):
        return False
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None


def _operator(name: str, inputs: str, results: int) -> Callable[[Callable[..., Any]], Any]:
    schema = f"({inputs}) -> ({', '.join(['Tensor'] * results)})"
    return torch.library.custom_op(f"oqc::{name}", mutates_args=(), schema=schema)


@_operator("fold", f"{_WEIGHTS}, str space, ScalarType dtype", 3)
def fold(
    weight: Tensor, lift: Tensor, project: Tensor | None, space: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """S, M and G."""
    if not on_kernels(weight):
        return plain.fold(weight, lift, project, space, dtype)
    from oqc.ops import triton_fold

    with on_device_of(weight):
        given = (weight.contiguous(), lift.contiguous(), None if project is None else project.contiguous())
        return triton_fold.forward(*given, space=space, dtype=dtype)


@_operator("fold_backward", f"Tensor dstack, Tensor dmerged, Tensor dgram, {_WEIGHTS}, str space", 3)
def _fold_backward(*args: Any) -> tuple[Tensor, ...]:
    *upstream, weight, lift, project, space = args
    if not on_kernels(weight):
        return plain.gradients(plain.fold, tuple(upstream), (weight, lift, project), (space, upstream[0].dtype))
    from oqc.ops import triton_fold

    with on_device_of(weight):
        given = (weight.contiguous(), lift.contiguous(), None if project is None else project.contiguous())
        dstack, dmerged, dgram = (item.contiguous() for item in upstream)
        return triton_fold.backward(dstack, dmerged, dgram, *given, space=space)


@_operator("afbo", f"{_AFBO}, {_FORM}", 7)
def afbo(*args: Any) -> tuple[Tensor, ...]:
    """y; proj and b; z, P b, |b|^2 and W b."""
    x, weight_in, bias_in, tap_a, bias_a, tap_c, bias_c, stack, merged, gram, bias, gate = args[:12]
    form, hidden = Form(*args[12:]), stack.shape[1]
    if not on_kernels(x):
        return plain.afbo(*args), *_afbo_shapes(*args)[1:]
    from oqc.ops import triton_complement, triton_spatial

    with on_device_of(x):
        proj = F.linear(x, weight_in, cast(bias_in, x))  # [T, C]
        a, c, u, v, logit = split(proj, hidden, form)
        b = x.new_empty(x.shape[0], hidden)
        triton_spatial.forward(a, c, (tap_a, bias_a, tap_c, bias_c), **_place(form), out=b)
        if form.space == "host":
            y, saved = F.linear(b, stack, cast(bias, x)), _empty(x, 4)
        else:
            value = gate if logit is None else logit[:, 0]
            branch = (u, v, value, stack, merged, gram, bias)
            y, *saved = triton_complement.forward(b, *branch, **_kind(form), save=form.save)
    return (y, proj, b, *saved) if form.save else (y, *_empty(x, 2), *saved)


@_operator("afbo_backward", f"Tensor dy, {_AFBO}, Tensor proj, Tensor b, {_SAVED}, {_FORM}", 9)
def _afbo_backward(*args: Any) -> tuple[Tensor, ...]:
    """dx, dweight_in, dbias_in, the depthwise maps' gradients in one vector of 20 H, dS, dM, dG, dbias, dgate."""
    dy, x, weight_in, bias_in, tap_a, bias_a, tap_c, bias_c, stack, merged, gram, bias, gate = args[:13]
    proj, b, z, t, power, host = args[13:19]
    form, hidden = Form(*args[19:]), stack.shape[1]
    if not on_kernels(x):
        dx, dw, db, *maps, ds, dm, dg, dbias, dgate = plain.gradients(plain.afbo, dy, args[1:13], form)
        parts = [g.new_zeros(hidden) if item is None else g for g, item in zip(maps, args[4:8], strict=True)]
        return dx, dw, db, torch.cat([part.float().flatten() for part in parts]), ds, dm, dg, dbias, dgate
    from oqc.ops import triton_complement, triton_spatial, triton_sums

    dy = dy.contiguous()
    with on_device_of(x):
        dproj = torch.empty_like(proj)
        a, c, u, v, logit = split(proj, hidden, form)
        da, dc, du, dv, dlogit = split(dproj, hidden, form)
        if form.space == "host":
            stacked, dpower, (dmerged, dgram, dgate) = dy, None, _empty(x, 3)
            dbias = triton_sums.column_sums(dy) if bias is not None else x.new_empty(0)
        else:
            if form.shared:  # added to the host's own below
                du, dv = torch.empty_like(u), torch.empty_like(v)
            value = gate if logit is None else logit[:, 0]
            branch = (dy, host, u, v, value, t, power, merged, gram, bias is not None)
            stacked, dpower, dgram, dgate, dbias = triton_complement.backward(
                *branch, hidden=hidden, **_kind(form), du=du, dv=dv, dgate=dlogit
            )
            dmerged = dy.T @ z
        taps = (tap_a, bias_a, tap_c, bias_c)
        flat = triton_spatial.backward(stacked @ stack, dpower, a, c, taps, **_place(form), da=da, dc=dc)
        sums = flat[20 * hidden :].view(2, hidden)  # of da and dc over tokens
        if form.shared:
            for out, total, extra in ((da, sums[0], du), (dc, sums[1], dv)):
                out[:, : form.rank] += extra
                total[: form.rank] += extra.sum(0)
        dbias_in = flat.new_zeros(0 if bias_in is None else proj.shape[1])
        if bias_in is not None:
            dbias_in[: 2 * hidden] = sums.view(-1)
            if logit is not None:
                dbias_in[-GATE_COLUMNS] = dgate
        inner = (dproj @ weight_in, dproj.T @ x, _as(dbias_in, bias_in), flat[: 20 * hidden].clone())
    return *inner, stacked.T @ b, dmerged, dgram, _as(dbias, bias), dgate


@_operator("complement", f"{_COMPLEMENT}, {_FORM}", 5)
def complement(*args: Any) -> tuple[Tensor, ...]:
    """y; z, P b, |b|^2 and W b."""
    form = Form(*args[8:])
    if not on_kernels(args[0]):
        return plain.complement(*args), *_complement_shapes(*args)[1:]
    from oqc.ops import triton_complement

    with on_device_of(args[0]):
        return triton_complement.forward(*args[:8], **_kind(form), save=form.save)


@_operator("complement_backward", f"Tensor dy, {_COMPLEMENT}, {_SAVED}, {_FORM}", 8)
def _complement_backward(*args: Any) -> tuple[Tensor, ...]:
    """The gradients of b, u, v, gate, S, M, G and bias."""
    dy, b, u, v, gate, stack, merged, gram, bias, z, t, power, host = args[:13]
    form = Form(*args[13:])
    if not on_kernels(b):
        return plain.gradients(plain.complement, dy, args[1:9], form)
    from oqc.ops import triton_complement

    dy = dy.contiguous()
    with on_device_of(b):
        du, dv = torch.empty_like(u), torch.empty_like(v)
        dgate = torch.empty_like(gate) if form.gate == "token" else None
        branch = (dy, host, u, v, gate, t, power, merged, gram, bias is not None)
        stacked, dpower, dgram, total, dbias = triton_complement.backward(
            *branch, hidden=b.shape[1], **_kind(form), du=du, dv=dv, dgate=dgate
        )
        db = stacked @ stack
        if dpower is not None:
            db.addcmul_(b, (2 * dpower[:, None]).to(b.dtype))
        weights = (stacked.T @ b, dy.T @ z, dgram, _as(dbias, bias))
    return db, du, dv, total if dgate is None else dgate, *weights


# Shapes, for tracing and for the places of what the plain path does not keep.


@fold.register_fake
def _fold_shapes(
    weight: Tensor, lift: Tensor, project: Tensor | None, space: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    (width, hidden), padded = weight.shape, lift.shape[1] + -lift.shape[1] % 8
    stack = weight.new_empty(width + (0 if space == "none" else padded), hidden, dtype=dtype)
    gram = weight.new_empty(padded, padded, dtype=torch.promote_types(weight.dtype, torch.float32))
    return stack, weight.new_empty(width, padded, dtype=dtype), gram


@_fold_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    weight, lift, project = args[3:6]
    return torch.empty_like(weight), torch.empty_like(lift), _like(project, weight)


@afbo.register_fake
def _afbo_shapes(*args: Any) -> tuple[Tensor, ...]:
    x, weight_in, stack, merged, form = args[0], args[1], args[7], args[8], Form(*args[12:])
    kept = [x.new_zeros(x.shape[0], n) for n in (weight_in.shape[0], stack.shape[1])] if form.save else _empty(x, 2)
    if form.space == "host":
        return x.new_zeros(x.shape[0], stack.shape[0]), *kept, *_empty(x, 4)
    return x.new_zeros(x.shape[0], merged.shape[0]), *kept, *_saved_shapes(x, merged, form)


@_afbo_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    _, x, weight_in, bias_in, _, _, _, _, stack, merged, gram, bias, gate = args[:13]
    flat = x.new_empty(20 * stack.shape[1], dtype=torch.float32)
    logit = x.new_empty((), dtype=torch.float32) if Form(*args[19:]).gate == "logit" else x.new_empty(0)
    weights = (torch.empty_like(stack), *(_like(item, x) for item in (merged, gram, bias)))
    dgate = logit if gate is None else torch.empty_like(gate)
    return torch.empty_like(x), torch.empty_like(weight_in), _like(bias_in, x), flat, *weights, dgate


@complement.register_fake
def _complement_shapes(*args: Any) -> tuple[Tensor, ...]:
    b, merged = args[0], args[5]
    return b.new_zeros(b.shape[0], merged.shape[0]), *_saved_shapes(b, merged, Form(*args[8:]))


@_complement_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    return *(torch.empty_like(item) for item in args[1:8]), _like(args[8], args[1])


def _saved_shapes(x: Tensor, merged: Tensor, form: Form) -> tuple[Tensor, ...]:
    kept, full, (width, padded) = x.shape[0] if form.save else 0, form.space == "hidden", merged.shape
    beside = padded if x.dtype in (torch.bfloat16, torch.float16) else 0  # t comes from the same product as W b
    return (
        x.new_zeros(kept, padded),
        x.new_zeros(0 if form.space == "none" else kept, padded),
        x.new_zeros(kept if full else 0, dtype=torch.float32),
        x.new_zeros(kept, width + beside) if full and form.save else x.new_zeros(0),
    )


# Gradients.


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    count = len(inputs) - len(Form._fields)
    ctx.save_for_backward(*inputs[:count], *output[1:])
    ctx.count, ctx.rest = count, inputs[count:]
    ctx.set_materialize_grads(False)


def _remember_weights(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.count, ctx.rest = 3, inputs[3:]


def _afbo_gradients(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    dx, dweight, dbias_in, flat, *others = _afbo_backward(dy, *args)
    maps, hidden = args[3:7], args[3].shape[0]
    parts = zip(flat.split([9 * hidden, hidden, 9 * hidden, hidden]), maps, strict=True)
    return dx, dweight, dbias_in, *(g if item is None else g.view_as(item).to(item.dtype) for g, item in parts), *others


def _differentiate(function: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient for the dispatcher: by the backward operator or, where it is to be differentiated again, plainly."""

    def gradient(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing recomputes them at the first look
        inputs: Sequence[Any] = saved[: ctx.count]
        if upstream[0] is None:
            return (None,) * (ctx.count + len(ctx.rest))
        given: Any = upstream if function is plain.fold else upstream[:1]
        if torch.is_grad_enabled():
            found = plain.differentiable_gradients(function, given, inputs, ctx.rest)
        else:
            tail = ctx.rest[:1] if function is plain.fold else ctx.rest  # space, without the dtype
            found = backward(*given, *saved, *tail)
        return *(None if item is None else g for item, g in zip(inputs, found, strict=True)), *(None for _ in ctx.rest)

    return gradient


fold.register_autograd(_differentiate(plain.fold, _fold_backward), setup_context=_remember_weights)
afbo.register_autograd(_differentiate(plain.afbo, _afbo_gradients), setup_context=_remember)
complement.register_autograd(_differentiate(plain.complement, _complement_backward), setup_context=_remember)


# Small things.


def _place(form: Form) -> dict[str, Any]:
    tokens = form.prefix + form.rows * form.columns
    return {"tokens": tokens, "grid": (form.rows, form.columns), "prefix": form.prefix}


def _kind(form: Form) -> dict[str, Any]:
    named = {"rank": form.rank, "space": form.space, "normalise": form.normalise}
    return {**named, "gate_kind": form.gate, "eps": form.eps}


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _empty(x: Tensor, count: int) -> list[Tensor]:
    return [x.new_empty(0) for _ in range(count)]


def _like(given: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0) if given is None else torch.empty_like(given)


def _as(gradient: Tensor, given: Tensor | None) -> Tensor:
    return gradient if given is None else gradient.to(given.dtype)
