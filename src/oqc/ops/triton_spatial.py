"""AFBO's spatial part in one kernel per direction: b = GELU(DW3x3(a) + bias_a) * (DW3x3(c) + bias_c).

The maps are depthwise, so a thread can own a channel and walk the whole token grid of an image by itself: it reads
every input once, keeps the rows it still needs in registers, and never waits for another thread. The grid's columns are
unrolled (the tuples below hold one value a column), its rows are a loop. Grids wider than a strip are cut into column
strips, each of which recomputes what it needs of its neighbours; rows are never cut. Prefix tokens come before the grid
and pass by the depthwise maps. Everything is fp32 inside.

Forward, per input row r: finish output row r - 1, go on with row r, begin row r + 1. Backward, from a and c alone:

    left, right as in the forward;   dleft = db * right * gelu'(left),   dright = db * gelu(left)
    da = DW^T(dleft),   dc = DW^T(dright)
    tap and bias gradients: summed in registers over all the images a program sees, one fp32 partial a program

No atomics: the partials are added in a fixed order, so gradients are bit-reproducible.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="assignment,misc"
# ruff: noqa: RUF005, SIM108 -- the kernels are written in Triton's subset of the language
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oqc.ops.layout import cdiv
from oqc.ops.triton_sums import column_sums

CHANNELS = 32  # a program is one warp, a thread one channel
COLUMNS = 8  # of the grid that a thread holds at once
COLUMNS_CUT = 4  # the same for the backward on wider grids, where each side needs two more columns
WARPS_PER_SM = 8  # what the backward's registers leave room for; its grid is one such wave

Taps = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # weight [H, 1, 3, 3] and bias [H] of both maps


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_and_slope(x):
    cdf = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _filled(value, COUNT: tl.constexpr):
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (value,)
    return out


@triton.jit
def _taps(weight, bias, channel, mask, HAS_BIAS: tl.constexpr):
    """The nine taps of each channel, row by row, and its bias."""
    out = ()
    for i in tl.static_range(9):
        out = out + (tl.load(weight + channel * 9 + i, mask=mask, other=0.0).to(tl.float32),)
    if HAS_BIAS:
        out = out + (tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32),)
    else:
        out = out + (tl.zeros_like(out[0]),)
    return out


@triton.jit
def _load_row(base, stride, first, columns, channel, hidden, COUNT: tl.constexpr, HALO: tl.constexpr):
    """COUNT tokens of a grid row from column `first` on, and HALO more on either side (0 outside the grid)."""
    out = ()
    for i in tl.static_range(COUNT + 2 * HALO):
        column = first + i - HALO
        limit = hidden
        if HALO > 0:
            limit = tl.where((column >= 0) & (column < columns), hidden, 0)
        out = out + (tl.load(base + column * stride, mask=channel < limit, other=0.0).to(tl.float32),)
    return out


@triton.jit
def _store_row(base, stride, first, columns, channel, hidden, values, COUNT: tl.constexpr, CUT: tl.constexpr):
    for i in tl.static_range(COUNT):
        limit = hidden
        if CUT:
            limit = tl.where(first + i < columns, hidden, 0)
        tl.store(base + (first + i) * stride, values[i].to(base.dtype.element_ty), mask=channel < limit)


@triton.jit
def _add_row(acc, x, w0, w1, w2, COUNT: tl.constexpr, EDGE: tl.constexpr):
    """acc + the taps w0, w1, w2 along row x, which has EDGE more columns on either side than acc has (0: none)."""
    out = ()
    for i in tl.static_range(COUNT):
        value = acc[i] + w1 * x[i + EDGE]
        if i + EDGE > 0:
            value += w0 * x[i + EDGE - 1]
        if i + EDGE + 1 < COUNT + 2 * EDGE:
            value += w2 * x[i + EDGE + 1]
        out = out + (value,)
    return out


@triton.jit
def _product(left, right, COUNT: tl.constexpr):
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (_gelu(left[i]) * right[i],)
    return out


@triton.jit(do_not_specialize=["hidden", "tokens", "prefix", "rows", "strips"])
def _spatial_forward(
    a,  # [images * tokens, H], row stride a_row
    c,
    b,
    weight_a,  # [H, 9]
    bias_a,  # [H]
    weight_c,
    bias_c,
    hidden,
    tokens,
    prefix,
    rows,
    columns: tl.constexpr,
    a_row: tl.constexpr,
    c_row: tl.constexpr,
    b_row: tl.constexpr,
    strips,
    CUT: tl.constexpr,
    COLS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    EDGE: tl.constexpr = 1 if CUT else 0
    blocks = tl.cdiv(hidden, BLOCK)
    pid = tl.program_id(0)
    channel = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    unit = tl.num_programs(0) // blocks - 1 - pid // blocks  # the last first: the cache still holds it
    first = (unit % strips) * COLS
    token = (unit // strips).to(tl.int64) * tokens
    mask = channel < hidden
    a_at, c_at, b_at = a + token * a_row + channel, c + token * c_row + channel, b + token * b_row + channel
    if unit % strips == 0:
        for _ in range(prefix):
            left = tl.load(a_at, mask=mask, other=0.0).to(tl.float32)
            right = tl.load(c_at, mask=mask, other=0.0).to(tl.float32)
            tl.store(b_at, (_gelu(left) * right).to(b.dtype.element_ty), mask=mask)
            a_at += a_row
            c_at += c_row
            b_at += b_row
    else:
        a_at += prefix * a_row
        c_at += prefix * c_row
        b_at += prefix * b_row
    ta = _taps(weight_a, bias_a, channel, mask, HAS_BIAS)
    tc = _taps(weight_c, bias_c, channel, mask, HAS_BIAS)
    start_a, start_c = _filled(ta[9], COLS), _filled(tc[9], COLS)
    xa = _load_row(a_at, a_row, first, columns, channel, hidden, COLS, EDGE)
    xc = _load_row(c_at, c_row, first, columns, channel, hidden, COLS, EDGE)
    left, right = (
        _add_row(start_a, xa, ta[3], ta[4], ta[5], COLS, EDGE),
        _add_row(start_c, xc, tc[3], tc[4], tc[5], COLS, EDGE),
    )
    next_left = _add_row(start_a, xa, ta[0], ta[1], ta[2], COLS, EDGE)
    next_right = _add_row(start_c, xc, tc[0], tc[1], tc[2], COLS, EDGE)
    for _ in range(1, rows):
        a_at += columns * a_row
        c_at += columns * c_row
        xa = _load_row(a_at, a_row, first, columns, channel, hidden, COLS, EDGE)
        xc = _load_row(c_at, c_row, first, columns, channel, hidden, COLS, EDGE)
        left = _add_row(left, xa, ta[6], ta[7], ta[8], COLS, EDGE)
        right = _add_row(right, xc, tc[6], tc[7], tc[8], COLS, EDGE)
        _store_row(b_at, b_row, first, columns, channel, hidden, _product(left, right, COLS), COLS, CUT)
        b_at += columns * b_row
        left, right = (
            _add_row(next_left, xa, ta[3], ta[4], ta[5], COLS, EDGE),
            _add_row(next_right, xc, tc[3], tc[4], tc[5], COLS, EDGE),
        )
        next_left = _add_row(start_a, xa, ta[0], ta[1], ta[2], COLS, EDGE)
        next_right = _add_row(start_c, xc, tc[0], tc[1], tc[2], COLS, EDGE)
    _store_row(b_at, b_row, first, columns, channel, hidden, _product(left, right, COLS), COLS, CUT)


@triton.jit
def _pre_gradients(left, right, db, dpower, COUNT: tl.constexpr, POWER: tl.constexpr):
    """dleft and dright of a row; dpower is the gradient of |b|^2, 2 b of which belongs to b."""
    dleft, dright = (), ()
    for i in tl.static_range(COUNT):
        value, slope = _gelu_and_slope(left[i])
        grad = db[i]
        if POWER:
            grad += 2.0 * dpower[i] * value * right[i]
        dleft = dleft + (grad * right[i] * slope,)
        dright = dright + (grad * value,)
    return dleft, dright


@triton.jit
def _tap_gradients(acc, d, x0, x1, x2, COUNT: tl.constexpr, EDGE: tl.constexpr):
    """acc (nine taps, bias) + one row's share: d against the input rows above, beside and below it."""
    w00, w01, w02, w10, w11, w12, w20, w21, w22, bias = acc
    for i in tl.static_range(COUNT):
        g = d[i + EDGE]
        if i + EDGE > 0:
            w00 += g * x0[i + 2 * EDGE - 1]
            w10 += g * x1[i + 2 * EDGE - 1]
            w20 += g * x2[i + 2 * EDGE - 1]
        w01 += g * x0[i + 2 * EDGE]
        w11 += g * x1[i + 2 * EDGE]
        w21 += g * x2[i + 2 * EDGE]
        if i + 1 < COUNT + EDGE:
            w02 += g * x0[i + 2 * EDGE + 1]
            w12 += g * x1[i + 2 * EDGE + 1]
            w22 += g * x2[i + 2 * EDGE + 1]
        bias += g
    return w00, w01, w02, w10, w11, w12, w20, w21, w22, bias


@triton.jit
def _sum_row(acc, values, first, columns, COUNT: tl.constexpr, CUT: tl.constexpr):
    for i in tl.static_range(COUNT):
        if CUT:
            acc += tl.where(first + i < columns, values[i], 0.0)
        else:
            acc += values[i]
    return acc


@triton.jit(do_not_specialize=["hidden", "images", "groups", "tokens", "prefix", "rows", "strips"])
def _spatial_backward(
    db,
    dpower,  # [images * tokens] fp32, or unused
    a,
    c,
    da,
    dc,
    partial,  # [groups, 22 * H] fp32: taps and bias of both maps, then the column sums of da and dc
    weight_a,
    bias_a,
    weight_c,
    bias_c,
    hidden,
    images,
    groups,
    tokens,
    prefix,
    rows,
    columns: tl.constexpr,
    db_row: tl.constexpr,
    a_row: tl.constexpr,
    c_row: tl.constexpr,
    da_row: tl.constexpr,
    dc_row: tl.constexpr,
    strips,
    CUT: tl.constexpr,
    COLS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    EDGE: tl.constexpr = 1 if CUT else 0
    MID: tl.constexpr = COLS + 2 * EDGE  # columns of dleft and dright
    blocks = tl.cdiv(hidden, BLOCK)
    pid = tl.program_id(0)
    channel = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    group = pid // blocks
    mask = channel < hidden
    lanes = tl.zeros([BLOCK], tl.int32)
    none = tl.zeros([BLOCK], tl.float32)
    ta = _taps(weight_a, bias_a, channel, mask, HAS_BIAS)
    tc = _taps(weight_c, bias_c, channel, mask, HAS_BIAS)
    start_a, start_c, zero = _filled(ta[9], MID), _filled(tc[9], MID), _filled(none, COLS)
    blank = _filled(none, MID + 2 * EDGE)
    grad_a, grad_c = _filled(none, 10), _filled(none, 10)
    sum_a, sum_c = none, none
    for i in range(group, images * strips, groups):
        unit = images * strips - 1 - i  # the last first, as in the forward
        first = (unit % strips) * COLS
        token = (unit // strips).to(tl.int64) * tokens
        a_at, c_at, db_at = a + token * a_row + channel, c + token * c_row + channel, db + token * db_row + channel
        da_at, dc_at, dp_at = da + token * da_row + channel, dc + token * dc_row + channel, dpower + token + lanes
        if unit % strips == 0:
            for p in range(prefix):
                left = (tl.load(a_at + p * a_row, mask=mask, other=0.0).to(tl.float32),)
                right = (tl.load(c_at + p * c_row, mask=mask, other=0.0).to(tl.float32),)
                grad = (tl.load(db_at + p * db_row, mask=mask, other=0.0).to(tl.float32),)
                if POWER:
                    power = _load_row(dp_at, 1, p, columns, channel, hidden, 1, 0)
                else:
                    power = grad
                dleft, dright = _pre_gradients(left, right, grad, power, 1, POWER)
                sum_a += dleft[0]
                sum_c += dright[0]
                tl.store(da_at + p * da_row, dleft[0].to(da.dtype.element_ty), mask=mask)
                tl.store(dc_at + p * dc_row, dright[0].to(dc.dtype.element_ty), mask=mask)
        a_at += prefix * a_row
        c_at += prefix * c_row
        db_at += prefix * db_row
        da_at += prefix * da_row
        dc_at += prefix * dc_row
        dp_at += prefix
        a0, c0 = blank, blank
        a1 = _load_row(a_at, a_row, first, columns, channel, hidden, COLS, 2 * EDGE)
        c1 = _load_row(c_at, c_row, first, columns, channel, hidden, COLS, 2 * EDGE)
        left, right = (
            _add_row(start_a, a1, ta[3], ta[4], ta[5], MID, EDGE),
            _add_row(start_c, c1, tc[3], tc[4], tc[5], MID, EDGE),
        )
        next_left = _add_row(start_a, a1, ta[0], ta[1], ta[2], MID, EDGE)
        next_right = _add_row(start_c, c1, tc[0], tc[1], tc[2], MID, EDGE)
        out_a, out_c, next_a, next_c = zero, zero, zero, zero
        for r in range(1, rows + 1):  # dleft and dright of row r - 1, then da and dc of row r - 2
            a_at += columns * a_row
            c_at += columns * c_row
            below = tl.where(r < rows, hidden, 0)
            a2 = _load_row(a_at, a_row, first, columns, channel, below, COLS, 2 * EDGE)
            c2 = _load_row(c_at, c_row, first, columns, channel, below, COLS, 2 * EDGE)
            grad = _load_row(db_at, db_row, first, columns, channel, hidden, COLS, EDGE)
            if POWER:
                power = _load_row(dp_at, 1, first, columns, channel, hidden, COLS, EDGE)
            else:
                power = grad
            left = _add_row(left, a2, ta[6], ta[7], ta[8], MID, EDGE)
            right = _add_row(right, c2, tc[6], tc[7], tc[8], MID, EDGE)
            dleft, dright = _pre_gradients(left, right, grad, power, MID, POWER)
            grad_a = _tap_gradients(grad_a, dleft, a0, a1, a2, COLS, EDGE)
            grad_c = _tap_gradients(grad_c, dright, c0, c1, c2, COLS, EDGE)
            left, right = (
                _add_row(next_left, a2, ta[3], ta[4], ta[5], MID, EDGE),
                _add_row(next_right, c2, tc[3], tc[4], tc[5], MID, EDGE),
            )
            next_left = _add_row(start_a, a2, ta[0], ta[1], ta[2], MID, EDGE)
            next_right = _add_row(start_c, c2, tc[0], tc[1], tc[2], MID, EDGE)
            a0, a1, c0, c1 = a1, a2, c1, c2
            out_a = _add_row(out_a, dleft, ta[2], ta[1], ta[0], COLS, EDGE)
            out_c = _add_row(out_c, dright, tc[2], tc[1], tc[0], COLS, EDGE)
            if r > 1:
                sum_a = _sum_row(sum_a, out_a, first, columns, COLS, CUT)
                sum_c = _sum_row(sum_c, out_c, first, columns, COLS, CUT)
                _store_row(da_at, da_row, first, columns, channel, hidden, out_a, COLS, CUT)
                _store_row(dc_at, dc_row, first, columns, channel, hidden, out_c, COLS, CUT)
                da_at += columns * da_row
                dc_at += columns * dc_row
            out_a, out_c = (
                _add_row(next_a, dleft, ta[5], ta[4], ta[3], COLS, EDGE),
                _add_row(next_c, dright, tc[5], tc[4], tc[3], COLS, EDGE),
            )
            next_a = _add_row(zero, dleft, ta[8], ta[7], ta[6], COLS, EDGE)
            next_c = _add_row(zero, dright, tc[8], tc[7], tc[6], COLS, EDGE)
            db_at += columns * db_row
            dp_at += columns
        sum_a = _sum_row(sum_a, out_a, first, columns, COLS, CUT)
        sum_c = _sum_row(sum_c, out_c, first, columns, COLS, CUT)
        _store_row(da_at, da_row, first, columns, channel, hidden, out_a, COLS, CUT)
        _store_row(dc_at, dc_row, first, columns, channel, hidden, out_c, COLS, CUT)
    partial += group.to(tl.int64) * 22 * hidden
    for i in tl.static_range(9):
        tl.store(partial + channel * 9 + i, grad_a[i], mask=mask)
        tl.store(partial + 10 * hidden + channel * 9 + i, grad_c[i], mask=mask)
    tl.store(partial + 9 * hidden + channel, grad_a[9], mask=mask)
    tl.store(partial + 19 * hidden + channel, grad_c[9], mask=mask)
    tl.store(partial + 20 * hidden + channel, sum_a, mask=mask)
    tl.store(partial + 21 * hidden + channel, sum_c, mask=mask)


def forward(a: Tensor, c: Tensor, taps: Taps, *, tokens: int, grid: tuple[int, int], prefix: int, out: Tensor) -> None:
    """Writes b into `out`; a, c and out are `[images * tokens, H]` with any row stride."""
    hidden, (rows, columns) = a.shape[1], grid
    strips, width = _strips(columns, COLUMNS)
    images = a.shape[0] // tokens
    launches = cdiv(hidden, CHANNELS) * images * strips
    _spatial_forward[(launches,)](
        a,
        c,
        out,
        *_pointers(taps),
        hidden,
        tokens,
        prefix,
        rows,
        columns,
        a.stride(0),
        c.stride(0),
        out.stride(0),
        strips,
        CUT=strips > 1,
        COLS=width,
        HAS_BIAS=taps[1] is not None,
        BLOCK=CHANNELS,
        num_warps=1,
    )


def backward(
    db: Tensor,
    dpower: Tensor | None,
    a: Tensor,
    c: Tensor,
    taps: Taps,
    *,
    tokens: int,
    grid: tuple[int, int],
    prefix: int,
    da: Tensor,
    dc: Tensor,
) -> Tensor:
    """Writes da and dc; returns the other gradients in one fp32 vector of 22 H: taps and bias of the first map, of
    the second, then the sums of da and of dc over all tokens. `dpower` [T] is the gradient of |b|^2, if any."""
    hidden, (rows, columns) = a.shape[1], grid
    strips, width = _strips(columns, COLUMNS if columns <= COLUMNS else COLUMNS_CUT)
    images, blocks = a.shape[0] // tokens, cdiv(hidden, CHANNELS)
    share = max(1, cdiv(images * strips, max(1, processors(a.device) * WARPS_PER_SM // blocks)))
    groups = cdiv(images * strips, share)
    partial = torch.empty(groups, 22 * hidden, device=a.device, dtype=torch.float32)
    _spatial_backward[(blocks * groups,)](
        db,
        db if dpower is None else dpower,
        a,
        c,
        da,
        dc,
        partial,
        *_pointers(taps),
        hidden,
        images,
        groups,
        tokens,
        prefix,
        rows,
        columns,
        db.stride(0),
        a.stride(0),
        c.stride(0),
        da.stride(0),
        dc.stride(0),
        strips,
        CUT=strips > 1,
        COLS=width,
        HAS_BIAS=taps[1] is not None,
        POWER=dpower is not None,
        BLOCK=CHANNELS,
        num_warps=1,
    )
    return column_sums(partial)


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _strips(columns: int, most: int) -> tuple[int, int]:
    """Into how many strips the columns are cut, and how wide those are."""
    strips = cdiv(columns, most)
    return strips, cdiv(columns, strips)


def _pointers(taps: Taps) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight_a, bias_a, weight_c, bias_c = taps
    return weight_a, weight_a if bias_a is None else bias_a, weight_c, weight_c if bias_c is None else bias_c
