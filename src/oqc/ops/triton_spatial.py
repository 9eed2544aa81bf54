"""AFBO's spatial part in one kernel per direction: b = GELU(DW3x3(a) + bias_a) * (DW3x3(c) + bias_c).

The maps are depthwise, so a thread can own a channel and walk the whole token grid of an image by itself: it reads
every input once, keeps the rows it still needs in registers, and never waits for another program. The grid's columns
are unrolled (the tuples below hold one value a column), its rows are a loop. A row is loaded while the one before it is
worked on, as a tile of tokens by channels in the widest words, and changes hands inside the warp. Grids wider than a
strip are cut into column strips, each of which recomputes what it needs of its neighbours; rows are never cut. Prefix
tokens come before the grid and pass by the depthwise maps. Everything is fp32 inside.

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

from oqc.ops.device import processors
from oqc.ops.layout import cdiv
from oqc.ops.triton_sums import column_sums

CHANNELS = 32  # a program is one warp, a thread one channel
COLUMNS = 8  # of the grid that a thread holds at once; narrower grids are filled up: 3 and 7 abort Triton 3.6's LLVM
COLUMNS_CUT = 4  # the same for the backward on wider grids, where each side needs two more columns
FORWARD_WARPS, BACKWARD_WARPS = 16, 8  # a multiprocessor: what the registers leave room for

Taps = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # weight [H, 1, 3, 3] and bias [H] of both maps


@triton.jit
def _normal(x):
    """The normal distribution's cdf and exp(-x^2 / 2), which the slope needs anyway: fewer instructions than `erf`.

    In the form of Abramowitz and Stegun's 7.1.26, a term longer, its numbers fitted anew: 4e-9 off before rounding.
    """
    bell = tl.exp2(x * x * -0.7213475204444817)
    t = 1.0 / (1.0 + 0.276 * tl.abs(x))
    tail = 0.3221480677 + t * (-0.3138547659 + t * (0.4408106931 + t * -0.1134511137))
    tail = bell * t * (0.1176242232 + t * (0.04672289167 + t * tail))
    return tl.where(x < 0.0, tail, 1.0 - tail), bell


@triton.jit
def _gelu(x):
    return x * _normal(x)[0]


@triton.jit
def _gelu_and_slope(x):
    cdf, bell = _normal(x)
    return x * cdf, cdf + x * 0.3989422804014327 * bell


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
def _load_tile(row, stride, first, columns, channel, limit, TILE: tl.constexpr):
    """TILE tokens of a grid row from column `first` on, `[TILE, channels]` in the widest words; 0 outside the grid and
    from channel `limit` on. A tile waits in few registers until `_columns_of` takes it apart."""
    column = first + tl.arange(0, TILE)
    mask = ((column >= 0) & (column < columns))[:, None] & (channel < limit)[None, :]
    return tl.load(row + column[:, None] * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _halve(parts, COUNT: tl.constexpr, HALF: tl.constexpr):
    """COUNT blocks of 2 HALF columns as twice as many of HALF."""
    out = ()
    for i in tl.static_range(COUNT):
        x = tl.permute(tl.reshape(parts[i], (parts[i].shape[0], 2, HALF)), (0, 2, 1))
        low, high = tl.split(x)
        out = out + (low, high)
    return out


@triton.jit
def _columns_of(tile, COUNT: tl.constexpr, TILE: tl.constexpr):
    """The first COUNT tokens of a tile of 8 or 16, a tuple of `[channels]` in fp32."""
    parts = (tl.permute(tile, (1, 0)),)
    if TILE == 16:
        parts = _halve(_halve(parts, 1, 8), 2, 4)
    else:
        parts = _halve(parts, 1, 4)
    parts = _halve(parts, TILE // 4, 2)
    columns = ()
    for i in tl.static_range(TILE // 2):
        low, high = tl.split(parts[i])
        columns = columns + (low, high)
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (columns[i].to(tl.float32),)
    return out


@triton.jit
def _double(parts, COUNT: tl.constexpr, HALF: tl.constexpr):
    """The inverse of `_halve`: 2 COUNT blocks of HALF columns as COUNT of twice as many."""
    out = ()
    for i in tl.static_range(COUNT):
        x = tl.permute(tl.join(parts[2 * i], parts[2 * i + 1]), (0, 2, 1))
        out = out + (tl.reshape(x, (x.shape[0], 2 * HALF)),)
    return out


@triton.jit
def _store_tile(row, stride, first, columns, channel, hidden, values, COUNT: tl.constexpr):
    """The inverse of `_load_tile` and `_columns_of` for at most 8 tokens."""
    filled = ()
    for i in tl.static_range(8):
        if i < COUNT:
            filled = filled + (values[i].to(row.dtype.element_ty),)
        else:
            filled = filled + (tl.zeros_like(values[0]).to(row.dtype.element_ty),)
    parts = ()
    for i in tl.static_range(4):
        parts = parts + (tl.join(filled[2 * i], filled[2 * i + 1]),)
    tile = tl.permute(_double(_double(parts, 2, 2), 1, 4)[0], (1, 0))
    j = tl.arange(0, 8)
    mask = ((j < COUNT) & (first + j < columns))[:, None] & (channel < hidden)[None, :]
    tl.store(row + (first + j)[:, None] * stride + channel[None, :], tile, mask=mask)


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


@triton.jit(do_not_specialize=["images", "groups", "tokens", "prefix", "rows", "strips"])
def _spatial_forward(
    a,  # [images * tokens, H], row stride a_row
    c,
    b,
    weight_a,  # [H, 9]
    bias_a,  # [H]
    weight_c,
    bias_c,
    images,
    groups,
    tokens,
    prefix,
    rows,
    strips,
    hidden: tl.constexpr,  # and the strides: what the width of a load follows from
    columns: tl.constexpr,
    a_row: tl.constexpr,
    c_row: tl.constexpr,
    b_row: tl.constexpr,
    CUT: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    EDGE: tl.constexpr = 1 if CUT else 0
    WIDE: tl.constexpr = COLS + 2 * EDGE
    blocks: tl.constexpr = (hidden + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    channel = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    group = pid // blocks
    mask = channel < hidden
    ta = _taps(weight_a, bias_a, channel, mask, HAS_BIAS)
    tc = _taps(weight_c, bias_c, channel, mask, HAS_BIAS)
    start_a, start_c = _filled(ta[9], COLS), _filled(tc[9], COLS)
    units = images * strips
    unit = units - 1 - group  # the last first: the cache still holds it
    first = (unit % strips) * COLS
    token = (unit // strips).to(tl.int64) * tokens + prefix
    tile_a = _load_tile(a + token * a_row, a_row, first - EDGE, columns, channel, hidden, TILE)
    tile_c = _load_tile(c + token * c_row, c_row, first - EDGE, columns, channel, hidden, TILE)
    for _ in range(group, units, groups):
        first = (unit % strips) * COLS
        token = (unit // strips).to(tl.int64) * tokens
        if unit % strips == 0:
            for p in range(prefix):
                left = tl.load(a + (token + p) * a_row + channel, mask=mask, other=0.0).to(tl.float32)
                right = tl.load(c + (token + p) * c_row + channel, mask=mask, other=0.0).to(tl.float32)
                tl.store(b + (token + p) * b_row + channel, (_gelu(left) * right).to(b.dtype.element_ty), mask=mask)
        token += prefix
        a_at, c_at, b_at = a + token * a_row, c + token * c_row, b + token * b_row
        unit -= groups  # the next: its first row is loaded while this one's last is worked on
        after = tl.maximum(unit, 0)
        ahead = (after // strips).to(tl.int64) * tokens + prefix
        left, right, next_left, next_right = start_a, start_c, start_a, start_c
        for r in range(rows):  # row r ends output row r - 1, goes on with row r and begins row r + 1
            xa, xc = _columns_of(tile_a, WIDE, TILE), _columns_of(tile_c, WIDE, TILE)
            a_at += columns * a_row
            c_at += columns * c_row
            at = first - EDGE
            if r + 1 == rows:
                a_at, c_at, at = a + ahead * a_row, c + ahead * c_row, (after % strips) * COLS - EDGE
            tile_a = _load_tile(a_at, a_row, at, columns, channel, hidden, TILE)
            tile_c = _load_tile(c_at, c_row, at, columns, channel, hidden, TILE)
            if r > 0:
                left = _add_row(left, xa, ta[6], ta[7], ta[8], COLS, EDGE)
                right = _add_row(right, xc, tc[6], tc[7], tc[8], COLS, EDGE)
                _store_tile(b_at, b_row, first, columns, channel, hidden, _product(left, right, COLS), COLS)
                b_at += columns * b_row
            left, right = (
                _add_row(next_left, xa, ta[3], ta[4], ta[5], COLS, EDGE),
                _add_row(next_right, xc, tc[3], tc[4], tc[5], COLS, EDGE),
            )
            next_left = _add_row(start_a, xa, ta[0], ta[1], ta[2], COLS, EDGE)
            next_right = _add_row(start_c, xc, tc[0], tc[1], tc[2], COLS, EDGE)
        _store_tile(b_at, b_row, first, columns, channel, hidden, _product(left, right, COLS), COLS)


@triton.jit
def _load_powers(row, first, columns):
    """The gradient of |b|^2 of 8 tokens of a row, the same for every channel."""
    column = first + tl.arange(0, 8)
    return tl.load(row + column, mask=(column >= 0) & (column < columns), other=0.0)


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
def _sum_row(acc, values, first, columns, COUNT: tl.constexpr, BEYOND: tl.constexpr):
    for i in tl.static_range(COUNT):
        if BEYOND:
            acc += tl.where(first + i < columns, values[i], 0.0)
        else:
            acc += values[i]
    return acc


@triton.jit(do_not_specialize=["images", "groups", "tokens", "prefix", "rows", "strips"])
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
    images,
    groups,
    tokens,
    prefix,
    rows,
    strips,
    hidden: tl.constexpr,
    columns: tl.constexpr,
    db_row: tl.constexpr,
    a_row: tl.constexpr,
    c_row: tl.constexpr,
    da_row: tl.constexpr,
    dc_row: tl.constexpr,
    CUT: tl.constexpr,
    COLS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    EDGE: tl.constexpr = 1 if CUT else 0
    MID: tl.constexpr = COLS + 2 * EDGE  # columns of dleft and dright
    WIDE: tl.constexpr = COLS + 4 * EDGE  # columns of a and c
    BEYOND: tl.constexpr = CUT or columns < COLS  # whether some of them are none of the grid's
    TILE: tl.constexpr = 8
    blocks: tl.constexpr = (hidden + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    channel = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    group = pid // blocks
    mask = channel < hidden
    none = tl.zeros([BLOCK], tl.float32)
    ta = _taps(weight_a, bias_a, channel, mask, HAS_BIAS)
    tc = _taps(weight_c, bias_c, channel, mask, HAS_BIAS)
    start_a, start_c, zero = _filled(ta[9], MID), _filled(tc[9], MID), _filled(none, COLS)
    blank = _filled(none, WIDE)
    grad_a, grad_c = _filled(none, 10), _filled(none, 10)
    sum_a, sum_c = none, none
    units = images * strips
    unit = units - 1 - group  # the last first, as in the forward
    first = (unit % strips) * COLS
    token = (unit // strips).to(tl.int64) * tokens + prefix
    tile_a = _load_tile(a + token * a_row, a_row, first - 2 * EDGE, columns, channel, hidden, TILE)
    tile_c = _load_tile(c + token * c_row, c_row, first - 2 * EDGE, columns, channel, hidden, TILE)
    for _ in range(group, units, groups):
        first = (unit % strips) * COLS
        token = (unit // strips).to(tl.int64) * tokens
        if unit % strips == 0:
            for p in range(prefix):
                left = (tl.load(a + (token + p) * a_row + channel, mask=mask, other=0.0).to(tl.float32),)
                right = (tl.load(c + (token + p) * c_row + channel, mask=mask, other=0.0).to(tl.float32),)
                grad = (tl.load(db + (token + p) * db_row + channel, mask=mask, other=0.0).to(tl.float32),)
                power = grad
                if POWER:
                    power = (tl.load(dpower + token + p),)
                dleft, dright = _pre_gradients(left, right, grad, power, 1, POWER)
                sum_a += dleft[0]
                sum_c += dright[0]
                tl.store(da + (token + p) * da_row + channel, dleft[0].to(da.dtype.element_ty), mask=mask)
                tl.store(dc + (token + p) * dc_row + channel, dright[0].to(dc.dtype.element_ty), mask=mask)
        token += prefix
        a_at, c_at, db_at = a + token * a_row, c + token * c_row, db + token * db_row
        da_at, dc_at, dp_at = da + token * da_row, dc + token * dc_row, dpower + token
        a0, c0 = blank, blank
        a1, c1 = _columns_of(tile_a, WIDE, TILE), _columns_of(tile_c, WIDE, TILE)
        a_at += columns * a_row
        c_at += columns * c_row
        below = tl.where(rows > 1, hidden, 0)
        tile_a = _load_tile(a_at, a_row, first - 2 * EDGE, columns, channel, below, TILE)
        tile_c = _load_tile(c_at, c_row, first - 2 * EDGE, columns, channel, below, TILE)
        tile_b = _load_tile(db_at, db_row, first - EDGE, columns, channel, hidden, TILE)
        powers = tile_b
        if POWER:
            powers = _load_powers(dp_at, first - EDGE, columns)
        left, right = (
            _add_row(start_a, a1, ta[3], ta[4], ta[5], MID, EDGE),
            _add_row(start_c, c1, tc[3], tc[4], tc[5], MID, EDGE),
        )
        next_left = _add_row(start_a, a1, ta[0], ta[1], ta[2], MID, EDGE)
        next_right = _add_row(start_c, c1, tc[0], tc[1], tc[2], MID, EDGE)
        out_a, out_c, next_a, next_c = zero, zero, zero, zero
        unit -= groups  # the next: its first row is loaded while this one's last is worked on
        after = tl.maximum(unit, 0)
        ahead = (after // strips).to(tl.int64) * tokens + prefix
        for r in range(1, rows + 1):  # dleft and dright of row r - 1, then da and dc of row r - 2
            a2, c2 = _columns_of(tile_a, WIDE, TILE), _columns_of(tile_c, WIDE, TILE)
            grad = _columns_of(tile_b, MID, TILE)
            power = grad
            if POWER:
                power = _columns_of(tl.broadcast_to(powers[:, None], (TILE, BLOCK)), MID, TILE)
            a_at += columns * a_row
            c_at += columns * c_row
            db_at += columns * db_row
            at = first - 2 * EDGE
            below = tl.where(r + 1 < rows, hidden, 0)
            if r == rows:
                a_at, c_at, at = a + ahead * a_row, c + ahead * c_row, (after % strips) * COLS - 2 * EDGE
                below = hidden
            tile_a = _load_tile(a_at, a_row, at, columns, channel, below, TILE)
            tile_c = _load_tile(c_at, c_row, at, columns, channel, below, TILE)
            below = tl.where(r < rows, hidden, 0)
            tile_b = _load_tile(db_at, db_row, first - EDGE, columns, channel, below, TILE)
            if POWER:
                dp_at += columns
                powers = _load_powers(dp_at, first - EDGE, tl.where(r < rows, columns, 0))
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
                sum_a = _sum_row(sum_a, out_a, first, columns, COLS, BEYOND)
                sum_c = _sum_row(sum_c, out_c, first, columns, COLS, BEYOND)
                _store_tile(da_at, da_row, first, columns, channel, hidden, out_a, COLS)
                _store_tile(dc_at, dc_row, first, columns, channel, hidden, out_c, COLS)
                da_at += columns * da_row
                dc_at += columns * dc_row
            out_a, out_c = (
                _add_row(next_a, dleft, ta[5], ta[4], ta[3], COLS, EDGE),
                _add_row(next_c, dright, tc[5], tc[4], tc[3], COLS, EDGE),
            )
            next_a = _add_row(zero, dleft, ta[8], ta[7], ta[6], COLS, EDGE)
            next_c = _add_row(zero, dright, tc[8], tc[7], tc[6], COLS, EDGE)
        sum_a = _sum_row(sum_a, out_a, first, columns, COLS, BEYOND)
        sum_c = _sum_row(sum_c, out_c, first, columns, COLS, BEYOND)
        _store_tile(da_at, da_row, first, columns, channel, hidden, out_a, COLS)
        _store_tile(dc_at, dc_row, first, columns, channel, hidden, out_c, COLS)
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
    strips = cdiv(columns, COLUMNS)
    images, blocks, groups = _programs(a, tokens, strips, FORWARD_WARPS)
    _spatial_forward[(blocks * groups,)](
        a,
        c,
        out,
        *_pointers(taps),
        images,
        groups,
        tokens,
        prefix,
        rows,
        strips,
        hidden,
        columns,
        a.stride(0),
        c.stride(0),
        out.stride(0),
        CUT=strips > 1,
        COLS=COLUMNS,
        TILE=16 if strips > 1 else 8,
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
    width = COLUMNS if columns <= COLUMNS else COLUMNS_CUT
    strips = cdiv(columns, width)
    images, blocks, groups = _programs(a, tokens, strips, BACKWARD_WARPS)
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
        images,
        groups,
        tokens,
        prefix,
        rows,
        strips,
        hidden,
        columns,
        db.stride(0),
        a.stride(0),
        c.stride(0),
        da.stride(0),
        dc.stride(0),
        CUT=strips > 1,
        COLS=width,
        HAS_BIAS=taps[1] is not None,
        POWER=dpower is not None,
        BLOCK=CHANNELS,
        num_warps=1,
    )
    return column_sums(partial)


def _programs(a: Tensor, tokens: int, strips: int, warps: int) -> tuple[int, int, int]:
    """How many images, blocks of channels, and groups of programs: one wave of `warps` a multiprocessor, each of which
    takes every groups-th image."""
    images, blocks = a.shape[0] // tokens, cdiv(a.shape[1], CHANNELS)
    share = max(1, cdiv(images * strips, max(1, processors(a.device) * warps // blocks)))
    return images, blocks, cdiv(images * strips, share)


def _pointers(taps: Taps) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight_a, bias_a, weight_c, bias_c = taps
    return weight_a, weight_a if bias_a is None else bias_a, weight_c, weight_c if bias_c is None else bias_c
