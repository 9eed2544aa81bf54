"""The fused operators as PyTorch knows them: implementation, gradient and shapes for tracing of each.

`oqc::ffn` is a whole network: AFBO's with a complement or without, an MLP's or a GLU's with one. `oqc::complement` is
what follows the hidden map of any other host; `oqc::fold` makes what both need of the weights alone. An operator
returns a fixed number of tensors: what a form does not have is an empty one, and what stands behind y is for the
backward. They branch on the device: CUDA, or a CPU under Triton's interpreter, runs the kernels; anything else, float64
and second derivatives take the same functions in plain PyTorch (`plain`). Triton is imported when a kernel first runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from oqc.ops import plain
from oqc.ops.device import on_device_of, on_kernels
from oqc.ops.layout import (
    Branch,
    Form,
    Kept,
    Network,
    aligned,
    both_columns,
    cut,
    dstack_shape,
    flat_size,
    gate_columns,
    gate_parts,
    gram_of,
    hidden_of,
    host_rows,
    kind_of,
    maps_of,
    padded_rank,
    place_of,
    saved_shapes,
    schema,
    split,
    split_dstack,
    width_of,
    z_columns,
)
from oqc.ops.plain import cast
from oqc.ops.products import over_tokens

_FFN, _COMPLEMENT, _KEPT, _FORM = map(schema, (Network, Branch, Kept, Form))
_WEIGHTS = "Tensor weight, Tensor lift, Tensor? project"


def _operator(name: str, inputs: str, results: int) -> Callable[[Callable[..., Any]], Any]:
    schema = f"({inputs}) -> ({', '.join(['Tensor'] * results)})"
    return torch.library.custom_op(f"oqc::{name}", mutates_args=(), schema=schema)


@_operator("fold", f"{_WEIGHTS}, str space, ScalarType dtype", 2)
def fold(weight: Tensor, lift: Tensor, project: Tensor | None, space: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """S of all layers, which lie along the first axis: in full precision, and in `dtype`."""
    if not on_kernels(weight):
        return plain.fold(weight, lift, project, space, dtype)
    from oqc.ops import triton_fold

    with on_device_of(weight):
        given = (weight.contiguous(), lift.contiguous(), None if project is None else project.contiguous())
        return triton_fold.forward(*given, space=space, dtype=dtype)


@_operator("fold_backward", f"Tensor dstack, {_WEIGHTS}, str space, ScalarType dtype", 3)
def _fold_backward(*args: Any) -> tuple[Tensor, ...]:
    dstack, weight, lift, project, space, dtype = args
    if not on_kernels(weight):
        return plain.gradients(_plain_fold, dstack, (weight, lift, project), (space, dtype))
    from oqc.ops import triton_fold

    with on_device_of(weight):
        given = (weight.contiguous(), lift.contiguous(), None if project is None else project.contiguous())
        return triton_fold.backward(dstack.contiguous(), *given, space=space, dtype=dtype)


def _plain_fold(*args: Any) -> Tensor:
    return plain.fold(*args)[0]


@_operator("ffn", f"{_FFN}, {_FORM}", 11)
def ffn(*args: Any) -> tuple[Tensor, ...]:
    """y, or the residual + y; proj and [b | z | 1]; what the complement saves, and [W b | O^T b]; the norm of the sum
    with the residual, its mean and 1 / standard deviation."""
    given, form = cut(args, Network, Form)
    x, stack, bias, residual = given.x, given.stack, given.bias, given.residual
    hidden = hidden_of(stack, form)
    if not on_kernels(x):
        y = plain.ffn(*args)
        return y, *_ffn_shapes(*args)[1:-2], *_plain_norm(y, given, form)
    from oqc.ops import triton_complement, triton_mix, triton_spatial

    with on_device_of(x):
        n, stats = _empty(x, 2)
        proj = F.linear(x, given.weight_in, cast(given.bias_in, x))  # [T, C]
        a, c, u, v, logit = split(proj, hidden, form)
        both = x.new_empty(x.shape[0], both_columns(stack, form))  # [b | z | 1], b alone without a complement
        b, z = both[:, :hidden], both[:, hidden:]
        if form.mix == "afbo":
            triton_spatial.forward(a, c, given.taps, **place_of(form), out=b)
        else:
            triton_mix.forward(a, c, form.mix, out=b)
        saved: Sequence[Tensor] = _empty(x, 5)
        width, rest = width_of(stack.shape[0], form), None if residual is None else residual.contiguous()
        apart = form.space == "hidden" or (form.space != "host" and rest is not None)
        then = given.gamma is not None  # with a branch and a residual
        host = x.new_empty(0)
        if apart:  # W b by itself: a kernel adds what comes to it
            host = b @ host_rows(stack, form).T
        if form.space != "host":
            branch = (b, u, v, given.gate if logit is None else logit[:, 0], stack, gram_of(stack, given.exact, form))
            options = {**kind_of(form), "save": form.save, "out": z}
            if then:
                assert rest is not None
                norm = (given.gamma, given.beta, form.norm_eps)
                saved, y, n, stats = triton_complement.rows(*branch, bias, rest, *norm, **options, host=host)
            else:
                t = host[:, width:] if apart else None
                saved = triton_complement.coefficients(*branch, **options, t=t)
        if apart and not then:
            parts = (host[:, :width], z[:, : padded_rank(form)], stack, bias, saved[-1])
            y = triton_complement.combination(*parts, rest)
        elif not apart:
            y = F.linear(both[:, : stack.shape[1]], stack[:width], cast(bias, x))
            y = y if rest is None else rest + y
        host = host if form.space == "hidden" else x.new_empty(0)
    return (y, *((proj, both, *saved, host) if form.save else _empty(x, 8)), n, stats)


def _plain_norm(s: Tensor, given: Any, form: Form) -> tuple[Tensor, Tensor]:
    if given.gamma is None:
        return _norm_shapes(given.x, given)
    n, *stats = torch.native_layer_norm(s, s.shape[-1:], given.gamma, given.beta, form.norm_eps)
    return n.to(given.x.dtype), torch.stack([part.flatten() for part in stats])


@_operator("ffn_backward", f"Tensor dy, {_FFN}, Tensor proj, Tensor both, {_KEPT}, {_FORM}", 5)
def _ffn_backward(*args: Any) -> tuple[Tensor, ...]:
    """dx, dweight_in, in one vector the depthwise maps' gradients (20 H) and the sums of da and dc; then dW and dbias
    or, with a complement, dS with dbias in what follows (`split_dstack`), and parts of the gate's gradient."""
    dy, given, proj, both, kept, form = cut(args, Tensor, Network, Tensor, Tensor, Kept, Form)
    x, stack, bias = given.x, given.stack, given.bias
    hidden = hidden_of(stack, form)
    if not on_kernels(x):
        return plain.ffn_backward(dy, given, form)
    from oqc.ops import triton_complement, triton_mix, triton_spatial, triton_sums

    dy = dy.contiguous()
    with on_device_of(x):
        dproj = torch.empty_like(proj)
        a, c, u, v, logit = split(proj, hidden, form)
        da, dc, du, dv, dlogit = split(dproj, hidden, form)
        if form.space == "host":
            stacked, dpower = dy.to(x.dtype), None
            ends = triton_sums.column_sums(stacked) if bias is not None else x.new_empty(0)
        else:
            if form.shared:  # added to the host's own below
                du, dv = torch.empty_like(u), torch.empty_like(v)
            gate = given.gate if logit is None else logit[:, 0]
            branch = (kept.host, u, v, gate, triton_complement.Saved(*kept[:-1]), stack)
            stacked, dpower, ends = triton_complement.gradients(
                dy, *branch, **kind_of(form), du=du, dv=dv, dgate=dlogit
            )
        above = host_rows(stack, form)
        db = stacked[:, : len(above)] @ above
        if form.mix == "afbo":
            flat = triton_spatial.backward(db, dpower, a, c, given.taps, **place_of(form), da=da, dc=dc)
        else:
            flat = triton_mix.backward(db, dpower, a, c, form.mix, da=da, dc=dc)
        if form.shared:
            sums = flat[-maps_of(form) * hidden :].view(-1, hidden)
            for out, total, extra in ((da, sums[0], du), (da if dc is None else dc, sums[-1], dv)):
                out[:, : form.rank] += extra
                total[: form.rank] += extra.sum(0, dtype=total.dtype)
        dstack = over_tokens(stacked, both, full=form.space != "host")
        return dproj @ given.weight_in, over_tokens(dproj, x, full=False), flat, dstack, ends


@_operator("complement", f"{_COMPLEMENT}, {_FORM}", 8)
def complement(*args: Any) -> tuple[Tensor, ...]:
    """y; [z | 1], what the complement saves, and [W b | O^T b]."""
    (b, u, v, gate, stack, exact, bias), form = cut(args, Branch, Form)
    if not on_kernels(b):
        return plain.complement(*args), *_complement_shapes(*args)[1:]
    from oqc.ops import triton_complement

    with on_device_of(b):
        host, width = b @ host_rows(stack, form).T, width_of(stack.shape[0], form)
        z = b.new_empty(b.shape[0], z_columns(stack, form))
        branch = (u, v, gate, stack, gram_of(stack, exact, form))
        saved = triton_complement.coefficients(b, *branch, **kind_of(form), save=form.save, out=z, t=host[:, width:])
        y = triton_complement.combination(host[:, :width], z[:, : padded_rank(form)], stack, bias, saved.keep)
    return (y, z, *saved, host if form.space == "hidden" else b.new_empty(0)) if form.save else (y, *_empty(b, 7))


@_operator("complement_backward", f"Tensor dy, {_COMPLEMENT}, Tensor z, {_KEPT}, {_FORM}", 6)
def _complement_backward(*args: Any) -> tuple[Tensor, ...]:
    """The gradients of b, u, v, gate (a token's), of S with the bias's behind it, and parts of the gate's."""
    dy, given, z, kept, form = cut(args, Tensor, Branch, Tensor, Kept, Form)
    b, u, v, gate, stack, exact, _ = given
    hidden = b.shape[1]
    if not on_kernels(b):
        db, du, dv, dgate, _, dstack, dbias = plain.gradients(plain.complement, dy, given, form)
        return db, du, dv, dgate, *plain.ends_of(dstack, dbias, dgate)
    from oqc.ops import triton_complement

    dy = dy.contiguous()
    with on_device_of(b):
        du, dv = torch.empty_like(u), torch.empty_like(v)
        dgate = torch.empty_like(gate)
        stacked, dpower, ends = triton_complement.gradients(
            *(dy, kept.host, u, v, gate, triton_complement.Saved(*kept[:-1]), stack),
            **kind_of(form),
            du=du,
            dv=dv,
            dgate=dgate if form.gate_kind == "token" else None,
        )
        above = host_rows(stack, form)
        db = stacked[:, : len(above)] @ above
        if dpower is not None:
            db.addcmul_(b, (2 * dpower[:, None]).to(b.dtype))
        dstack = dstack_shape(exact, hidden + z.shape[1])
        over_tokens(stacked, b, out=dstack[:, :hidden])
        over_tokens(stacked, z, out=dstack[:, hidden:])
    return db, du, dv, dgate, dstack, ends


# Shapes, for tracing and for the places of what the plain path does not keep.


@fold.register_fake
def _fold_shapes(
    weight: Tensor, lift: Tensor, project: Tensor | None, space: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    (layers, width, hidden), wide = weight.shape, aligned(lift.shape[2])
    shape = (layers, width + (1 if space == "none" else 2) * wide, hidden + wide)
    full = torch.promote_types(weight.dtype, torch.float32)
    return weight.new_empty(shape, dtype=full), weight.new_empty(shape, dtype=dtype)


@_fold_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    weight, lift, project = args[1:4]
    return torch.empty_like(weight), torch.empty_like(lift), _like(project, weight)


@ffn.register_fake
def _ffn_shapes(*args: Any) -> tuple[Tensor, ...]:
    given, form = cut(args, Network, Form)
    x, stack = given.x, given.stack
    y = (x if given.residual is None else given.residual).new_zeros(x.shape[0], width_of(stack.shape[0], form))
    normed = _norm_shapes(x, given)
    if not form.save:
        return y, *_empty(x, 8), *normed
    kept = [x.new_zeros(x.shape[0], n) for n in (given.weight_in.shape[0], both_columns(stack, form))]
    return y, *kept, *(_empty(x, 6) if form.space == "host" else saved_shapes(x, y, form)), *normed


def _norm_shapes(x: Tensor, given: Network) -> tuple[Tensor, Tensor]:
    if given.gamma is None:
        return x.new_empty(0), x.new_empty(0)
    return x.new_empty(x.shape[0], given.gamma.shape[0]), x.new_empty(2, x.shape[0], dtype=torch.float32)


@_ffn_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    dy, given, _, _, _, form = cut(args, Tensor, Network, Tensor, Tensor, Kept, Form)
    x, stack = given.x, given.stack
    flat = _like_sums(x, flat_size(hidden_of(stack, form), form))
    if form.space == "host":
        dstack, ends = torch.empty_like(stack), x.new_empty(0) if given.bias is None else _like_sums(x, dy.shape[1])
    else:
        dstack = dstack_shape(given.exact, both_columns(stack, form) if on_kernels(x) else None)
        ends = _like_sums(x, gate_parts(x.shape[0], form) if on_kernels(x) else 1)
    return torch.empty_like(x), torch.empty_like(given.weight_in), flat, dstack, ends


@complement.register_fake
def _complement_shapes(*args: Any) -> tuple[Tensor, ...]:
    (b, _, _, _, stack, _, _), form = cut(args, Branch, Form)
    y = b.new_zeros(b.shape[0], width_of(stack.shape[0], form))
    if not form.save:
        return y, *_empty(b, 7)
    return y, b.new_zeros(b.shape[0], z_columns(stack, form)), *saved_shapes(b, y, form)


@_complement_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    _, given, _, _, form = cut(args, Tensor, Branch, Tensor, Kept, Form)
    b, stack = given.b, given.stack
    gradients = (torch.empty_like(item) for item in (b, given.u, given.v, given.gate))
    dstack = dstack_shape(given.exact, both_columns(stack, form) if on_kernels(b) else None)
    return *gradients, dstack, _like_sums(b, gate_parts(b.shape[0], form) if on_kernels(b) else 1)


# Gradients.


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    count = len(inputs) - len(Form._fields)
    ctx.save_for_backward(*inputs[:count], *output[1:])
    ctx.count, ctx.rest = count, inputs[count:]
    ctx.set_materialize_grads(False)


def _remember_network(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _remember(ctx, inputs, output[:-2])  # the norm's gradient belongs to who asked for it (`norm.made`)


def _remember_weights(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.count, ctx.rest = 3, inputs[3:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _ffn_gradients(dy: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    given, _, _, _, form = cut(args, Network, Tensor, Tensor, Kept, Form)
    weight_in, bias_in, taps, bias, gate = given.weight_in, given.bias_in, given.taps, given.bias, given.gate
    hidden = hidden_of(given.stack, form)
    dx, dweight, flat, dstack, ends = _ffn_backward(dy, *args)
    parts: Sequence[Tensor] = [flat] * 4  # of what is not there
    if form.mix == "afbo":
        parts = flat[: 20 * hidden].split([9 * hidden, hidden, 9 * hidden, hidden])
    dtaps = (
        part if item is None else part.view_as(item).to(item.dtype) for part, item in zip(parts, taps, strict=True)
    )
    sums = flat[-maps_of(form) * hidden :]
    dbias_in, dbias, dgate, dexact = sums, ends, ends, None
    if form.space != "host":
        dgate = ends.sum().view(1)
        dexact, dbias = split_dstack(dstack, given.exact, dy.shape[1], form)
        dstack = None
    if bias_in is not None:
        dbias_in = F.pad(sums, (0, weight_in.shape[0] - len(sums)))
        if form.gate_kind == "logit":
            columns = gate_columns(form.rank, form.shared)
            dbias_in = torch.cat([dbias_in[:-columns], F.pad(dgate, (0, columns - 1))])
        dbias_in = dbias_in.to(bias_in.dtype)
    dbias = dbias if bias is None else dbias.to(bias.dtype)
    dgate = dgate if gate is None or form.space == "host" else dgate.view_as(gate)
    return dx, dweight, dbias_in, *dtaps, dstack, dexact, dbias, dgate, dy, None, None


def _complement_gradients(dy: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    given, _, _, form = cut(args, Branch, Tensor, Kept, Form)
    gate, bias = given.gate, given.bias
    db, du, dv, dgate, dstack, ends = _complement_backward(dy, *args)
    dexact, dbias = split_dstack(dstack, given.exact, dy.shape[1], form)
    if form.gate_kind == "scalar":
        dgate = ends.sum().view_as(gate).to(gate.dtype)
    return db, du, dv, dgate, None, dexact, dbias if bias is None else dbias.to(bias.dtype)


def _differentiate(function: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient for the dispatcher: by the backward operator or, where it is to be differentiated again, plainly."""

    def gradient(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing recomputes them at the first look
        inputs: Sequence[Any] = saved[: ctx.count]
        if upstream[0] is None:
            return (None,) * (ctx.count + len(ctx.rest))
        given = upstream[:1]
        if torch.is_grad_enabled():
            found = plain.differentiable_gradients(function, given, inputs, ctx.rest)
        else:
            found = backward(*given, *saved, *ctx.rest)
        return *(None if item is None else g for item, g in zip(inputs, found, strict=True)), *(None for _ in ctx.rest)

    return gradient


fold.register_autograd(_differentiate(_plain_fold, _fold_backward), setup_context=_remember_weights)
ffn.register_autograd(_differentiate(plain.ffn, _ffn_gradients), setup_context=_remember_network)
complement.register_autograd(_differentiate(plain.complement, _complement_gradients), setup_context=_remember)


# Small things.


def _empty(x: Tensor, count: int) -> list[Tensor]:
    return [x.new_empty(0) for _ in range(count)]


def _like(given: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0) if given is None else torch.empty_like(given)


def _like_sums(x: Tensor, count: int) -> Tensor:
    """Sums over tokens: fp32 from kernels, x's own dtype from plain PyTorch."""
    return x.new_empty(count, dtype=torch.float32 if on_kernels(x) else x.dtype)
