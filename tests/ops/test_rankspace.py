"""The rank-space identity against the literal equations, in float64."""

import random
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from oqc.ops import rankspace, reference

EPS = 1e-6
FORMS = [("rank", True), ("rank", False), ("hidden", True), ("none", True)]
# Rows with a sine of at least 0.1 between b and O q, rank 4 and more: relative, per tensor.
RELATIVE = 1e-10
# Everything else. Both paths divide by sqrt(rest / H + eps), which is at least 1e-3, so rounding of 1e-16 in the
# squared norm grows to at most about 1e-10 in the output, and once more by 1e3 in a gradient: relative to the largest
# entry of the same gradient over all rows.
ABSOLUTE = 1e-6


def literal(b, u, v, gate, weight, bias, lift, project, *, space, normalise):
    """W (b + gate * delta) + bias, by the equations."""
    p = None if project is None else partial(F.linear, weight=project)
    parts = reference.update(b, u, v, partial(F.linear, weight=lift), p, space=space, normalise=normalise, eps=EPS)
    return F.linear(reference.inject(b, parts.delta, gate), weight, bias)


def case(seed):
    """Tensors of one fuzzed case, with zero, parallel and large rows among the tokens."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    tokens, width, hidden = rng.randint(1, 257), rng.randint(8, 512), rng.randint(9, 1000)
    rank = min(rng.choice([rng.randint(1, 8), rng.randint(1, 128)]), hidden)
    space, normalise = FORMS[seed % len(FORMS)]

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    b, u, v = normal(tokens, hidden), normal(tokens, rank), normal(tokens, rank)
    lift, project = normal(hidden, rank) / rank**0.5, normal(rank, hidden) / hidden**0.5
    for row in range(tokens):
        match rng.randint(0, 9):
            case 0:
                b[row] = 0
            case 1:
                u[row] = 0
            case 2:
                b[row] = (lift @ (u[row] * v[row])) * rng.choice([1, -2]) + rng.choice([0, 1e-3, 3]) * b[row]
            case 3:
                b[row] *= 1e4
            case 4:
                u[row] *= 1e4
    gate = torch.sigmoid(normal(tokens, 1) if seed % 8 < 4 else normal())
    weight, bias = normal(width, hidden) / hidden**0.5, normal(width)
    tensors = [b, u, v, gate, weight, bias, lift, project if space == "rank" else None]
    return tensors, dict(space=space, normalise=normalise), normal(tokens, width), rank


def sine(b, u, v, lift):
    """Of the angle between b and the lifted q; 1 where one of them is zero."""
    a = F.linear(reference.quadratic(u, v, EPS), lift)
    cosine = torch.cosine_similarity(a, b, dim=-1)
    return (1 - cosine.square()).clamp_min(0).sqrt()


def output_and_gradients(function, tensors, form, dy):
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    y = function(*leaves, **form)
    return [y, *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)]


def rows(tensors, keep):
    gate = tensors[3][keep] if tensors[3].dim() else tensors[3]
    return [*(t[keep] for t in tensors[:3]), gate, *tensors[4:]]


@pytest.mark.parametrize("chunk", range(10))
def test_500_fuzzed_cases(chunk):
    strict = loose = 0
    for seed in range(50 * chunk, 50 * chunk + 50):
        tensors, form, dy, rank = case(seed)
        regular = (sine(*tensors[:3], tensors[6]) >= 0.1) & (rank >= 4)
        for keep, is_regular in ((regular, True), (~regular, False)):
            if not keep.any():
                continue
            part = rows(tensors, keep)
            want = output_and_gradients(literal, part, form, dy[keep])
            got = output_and_gradients(partial(rankspace.output, eps=EPS), part, form, dy[keep])
            for w, x in zip(want, got, strict=True):
                assert torch.isfinite(w).all()
                assert torch.isfinite(x).all()
                if is_regular:
                    assert (w - x).norm() <= RELATIVE * w.norm(), (seed, form, w.shape)
                else:
                    assert (w - x).abs().max() <= ABSOLUTE * w.abs().max().clamp_min(1), (seed, form, w.shape)
            strict, loose = strict + is_regular, loose + (not is_regular)
    assert strict >= 35
    assert loose >= 5


@pytest.mark.parametrize("path", ["literal", "rank"])
@pytest.mark.parametrize("gate_shape", [(), (5, 1)])
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form, gate_shape, path):
    torch.manual_seed(0)
    double = partial(torch.randn, dtype=torch.float64, requires_grad=True)
    space, normalise = form
    tensors = [double(5, 9), double(5, 6), double(5, 6), double(gate_shape), double(4, 9), double(4), double(9, 6)]
    tensors.append(double(6, 9) if space == "rank" else None)
    function = literal if path == "literal" else partial(rankspace.output, eps=EPS)
    assert torch.autograd.gradcheck(lambda *t: function(*t, space=space, normalise=normalise), tensors)


@pytest.mark.parametrize("op", ["quadratic", "main_feature", "orthogonalize", "readout"])
def test_gradcheck_of_each_equation(op):
    torch.manual_seed(0)
    q, m = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gamma = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    functions = {
        "quadratic": lambda q, m, gamma: reference.quadratic(q, m, EPS),
        "main_feature": lambda q, m, gamma: reference.main_feature(q, EPS),
        "orthogonalize": lambda q, m, gamma: reference.orthogonalize(q, m, EPS),
        "readout": reference.readout,
    }
    assert torch.autograd.gradcheck(functions[op], (q, m, gamma))


def test_update_is_kappa_b_plus_lift_z():
    """(kappa, z) describe the literal update itself, not only its image under W."""
    for seed in (2, 6, 10):  # space = hidden
        tensors, form, _, _ = case(seed)
        b, u, v, gate, _, _, lift, project = tensors
        kappa, z = rankspace.coefficients(b, u, v, gate, lift, project, eps=EPS, **form)
        parts = reference.update(b, u, v, partial(F.linear, weight=lift), None, eps=EPS, **form)
        keep = sine(b, u, v, lift) >= 0.1
        assert torch.allclose((kappa * b + z @ lift.T)[keep], (gate * parts.delta)[keep], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_bf16_branch_error_is_not_above_the_literal_form(form):
    """With float64 as the truth, rounding the inputs to bf16 costs the identity no more than the literal form."""
    space, normalise = form
    torch.manual_seed(1)
    b, u, v = torch.randn(512, 200), torch.randn(512, 24), torch.randn(512, 24)
    weight, lift, project = torch.randn(64, 200) / 14, torch.randn(200, 24) / 5, torch.randn(24, 200) / 14
    gate = torch.tensor(0.5)
    tensors = [t.bfloat16() for t in (b, u, v, gate, weight, torch.zeros(64), lift, project)]
    if space != "rank":
        tensors[7] = None
    plain = F.linear(tensors[0].double(), tensors[4].double())
    truth = literal(*[None if t is None else t.double() for t in tensors], space=space, normalise=normalise)
    errors = [
        (function(*tensors, space=space, normalise=normalise).double() - truth).norm() / (truth - plain).norm()
        for function in (literal, partial(rankspace.output, eps=EPS))
    ]
    assert errors[1] <= 1.1 * errors[0], errors
    assert errors[1] < 0.02


def test_a_bias_much_larger_than_what_it_is_added_to_takes_no_digits():
    """Full OQC scales W b by 1 + kappa, and kappa grows as 1 / |b|: W b must not come out of a rounded sum with it."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape, std=1.0):
        return std * torch.randn(shape, generator=g, dtype=torch.float64)

    b, u, v, gate = normal(98, 256, std=1e-2), normal(98, 16), normal(98, 16), torch.tensor(0.9, dtype=torch.float64)
    weight, bias, lift = normal(64, 256, std=0.02), torch.ones(64, dtype=torch.float64), normal(256, 16, std=0.02)
    upstream, options = normal(98, 64), {"space": "hidden", "normalise": True}

    def gradient(output, dtype):
        at = b.to(dtype).requires_grad_()
        rest = (item.to(dtype) for item in (u, v, gate, weight, bias, lift))
        return torch.autograd.grad(output(at, *rest, None, **options), at, upstream.to(dtype))[0].double()

    want = gradient(literal, torch.float64)
    for dtype, own in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        found, plain = (
            (gradient(output, dtype) - want).norm() / want.norm()
            for output in (partial(rankspace.output, eps=EPS), literal)
        )
        assert found <= max(own, 2 * plain)
