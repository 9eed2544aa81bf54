"""How the operators lay out what they take and keep: S = [W M; P 0; 0 G], [b | z | 1], and what a form has of each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

GATE_COLUMNS = 16  # of proj: the gate's logit and zeros, so that rows stay aligned (`gate_columns`)
BF16_GRAM = 32  # the least rank whose G q is a product of bf16
LAYOUT = 9  # one more with every change of what an operator returns: compiled code kept on disk must not outlive it


class Form(NamedTuple):
    """What an operator is told besides its tensors."""

    rows: int = 0
    columns: int = 0
    prefix: int = 0
    rank: int = 0
    space: str = "rank"  # "host": no complement
    normalise: bool = True
    gate_kind: str = "scalar"  # "beta": its logit; "token": a value per token; "logit": logits in a column of proj
    shared: bool = False  # u and v are the first R channels of the host's maps
    mix: str = "afbo"  # what makes b of the maps; else an activation: act(a), or act(a) * c
    gated: bool = True  # whether there is a c
    eps: float = 1e-6
    save: bool = True  # whether a backward may follow
    norm_eps: float = 1e-5
    layout: int = LAYOUT


class Network(NamedTuple):
    """The tensors that `oqc::ffn` takes."""

    x: Tensor  # [T, D]
    weight_in: Tensor  # all maps of x, [C, D]
    bias_in: Tensor | None
    tap_a: Tensor | None  # AFBO's depthwise maps [H, 1, 3, 3]
    bias_a: Tensor | None
    tap_c: Tensor | None
    bias_c: Tensor | None
    stack: Tensor  # S in the compute dtype; W alone for a host alone
    exact: Tensor | None  # S in fp32
    bias: Tensor | None  # of W
    gate: Tensor | None
    residual: Tensor | None  # [T, D]
    gamma: Tensor | None  # of the LayerNorm that reads the sum with the residual, where that is wanted too
    beta: Tensor | None

    @property
    def taps(self) -> tuple[Tensor | None, ...]:
        return self.tap_a, self.bias_a, self.tap_c, self.bias_c


class Branch(NamedTuple):
    """The tensors that `oqc::complement` takes."""

    b: Tensor  # [T, H]
    u: Tensor
    v: Tensor
    gate: Tensor
    stack: Tensor
    exact: Tensor
    bias: Tensor | None


class Kept(NamedTuple):
    """What both keep of the forward for the backward: `triton_complement.Saved`, and [W b | O^T b] of full OQC. Before
    it stand proj and [b | z | 1], or [z | 1]."""

    t: Tensor
    gp: Tensor
    energy: Tensor
    power: Tensor
    keep: Tensor
    host: Tensor


_SCHEMA: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    **{kind: kind.__name__ for kind in (int, float, bool, str)},
}


def schema(kind: type) -> str:
    """A group of arguments as PyTorch's operators declare them."""
    return ", ".join(f"{_SCHEMA[hint]} {name}" for name, hint in get_type_hints(kind).items())


def cut(args: Sequence[Any], *kinds: Any) -> list[Any]:
    """An operator's arguments by their names: a kind for each group of them, `Tensor` for a single one."""
    left = iter(args)
    found = [next(left) if kind is Tensor else kind(*itertools.islice(left, len(kind._fields))) for kind in kinds]
    assert next(left, None) is None, "arguments are left over"
    return found


def split(proj: Tensor, hidden: int, form: Form) -> tuple[Any, ...]:
    """Views of proj's columns: a, c (None for a host of one map), u, v (None for a host alone) and the gate's columns
    (None without)."""
    first, wide = maps_of(form) * hidden, padded_rank(form)
    a, c = proj[:, :hidden], proj[:, hidden:first] if form.gated else None
    logit = proj[:, -gate_columns(form.rank, form.shared) :] if form.gate_kind == "logit" else None
    if form.space == "host":
        return a, c, None, None, logit
    if form.shared:
        return a, c, a[:, : form.rank], (a if c is None else c)[:, : form.rank], logit
    return a, c, proj[:, first : first + wide], proj[:, first + wide : first + 2 * wide], logit


def maps_of(form: Form) -> int:
    """How many the host has."""
    return 2 if form.gated else 1


def hidden_of(stack: Tensor, form: Form) -> int:
    """H: S has as many columns and, with a complement, those of M."""
    return stack.shape[1] - (0 if form.space == "host" else padded_rank(form))


def flat_size(hidden: int, form: Form) -> int:
    """Of the vector that holds the sums of the maps' gradients, behind those of the depthwise maps."""
    return (20 * hidden if form.mix == "afbo" else 0) + maps_of(form) * hidden


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes longer than a launch can afford."""
    return -(-a // b)


def lanes(count: int) -> int:
    """The power of two that a kernel's tile has for so many columns."""
    return max(16, 1 << (count - 1).bit_length())


def aligned(rank: int) -> int:
    """Ranks are padded with zeros to a multiple of 8, so that rows stay aligned."""
    return rank + -rank % 8


def gate_columns(rank: int, shared: bool) -> int:
    """Of proj, which begin with the gate's logit: the last of those that v is padded with, or columns behind it."""
    return 1 if rank % 8 and not shared else GATE_COLUMNS


def padded_rank(form: Form) -> int:
    return aligned(form.rank)


def gradient_tokens(rank: int) -> int:
    """That a program of the last gradient kernel takes: as many as leave room for its tiles."""
    return 16 if aligned(rank) <= 64 else 8


def gate_parts(tokens: int, form: Form) -> int:
    """How many numbers add up to the gradient of a gate: one a program."""
    return cdiv(tokens, gradient_tokens(form.rank))


def width_of(rows: int, form: Form) -> int:
    """D: S has as many rows and, with a complement, those of P and of G."""
    return rows - padded_rank(form) * {"host": 0, "none": 1}.get(form.space, 2)


def dstack_shape(exact: Tensor, columns: int | None = None) -> Tensor:
    """Of S and the bias's column; from kernels with rows and columns to spare."""
    if columns is None:
        return exact.new_empty(exact.shape[0], exact.shape[1] + 1)
    return exact.new_empty(exact.shape[0] + -exact.shape[0] % 64, columns)


def saved_shapes(x: Tensor, y: Tensor, form: Form) -> tuple[Tensor, ...]:
    """Those of `triton_complement.Saved`, and of [W b | O^T b]."""
    projected, normalised, full = form.space == "rank", form.normalise, form.space == "hidden"
    wide = (x.new_zeros(x.shape[0] if wanted else 0, padded_rank(form)) for wanted in (projected, normalised))
    numbers = (x.new_zeros(x.shape[0] if wanted else 0, dtype=torch.float32) for wanted in (normalised, full, full))
    return *wide, *numbers, x.new_zeros(x.shape[0], y.shape[1] + padded_rank(form)) if full else x.new_zeros(0)


def split_dstack(dstack: Tensor, exact: Tensor, width: int, form: Form) -> tuple[Tensor, Tensor]:
    """The gradients of S and of the bias, which for full OQC is the sum of two columns (from plain PyTorch one)."""
    rows, columns = exact.shape
    full = form.space == "hidden"
    dbias = dstack[:width, columns:][:, :2].sum(1) if full else dstack[:width, columns].contiguous()
    return dstack[:rows, :columns], dbias


def host_rows(stack: Tensor, form: Form) -> Tensor:
    """Of S what b is multiplied by: W and, with a complement, P or full's O^T."""
    rows = stack.shape[0] - (0 if form.space == "host" else padded_rank(form))
    return stack[:rows, : hidden_of(stack, form)]


def gram_of(stack: Tensor, exact: Tensor, form: Form) -> Tensor:
    """G: in bf16 where S is and its errors average out over the rank, else in fp32. In few dimensions a rounded G loses
    too much of a p that O all but ignores, and fp16 could not hold the squares of large weights."""
    rounded = stack.dtype == torch.bfloat16 and form.rank >= BF16_GRAM
    return (stack if rounded else exact)[-padded_rank(form) :, -padded_rank(form) :]


def both_columns(stack: Tensor, form: Form) -> int:
    """Of [b | z | 1], where the one has two: rows of whole 64 bytes in half precision, which cuBLAS's products over
    tokens like better."""
    return stack.shape[1] if form.space == "host" else stack.shape[1] + 2 + -(stack.shape[1] + 2) % 32


def z_columns(stack: Tensor, form: Form) -> int:
    """Of [z | 1], which ends as [b | z | 1] does."""
    return both_columns(stack, form) - stack.shape[1] + padded_rank(form)


def place_of(form: Form) -> dict[str, Any]:
    """What the spatial kernels are told of the tokens' grid."""
    tokens = form.prefix + form.rows * form.columns
    return {"tokens": tokens, "grid": (form.rows, form.columns), "prefix": form.prefix}


def kind_of(form: Form) -> dict[str, Any]:
    """What the complement's kernels are told."""
    named = {"rank": form.rank, "space": form.space, "normalise": form.normalise}
    return {**named, "gate_kind": form.gate_kind, "eps": form.eps}
