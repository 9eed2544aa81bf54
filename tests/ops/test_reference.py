"""Each equation on numbers that can be worked out by hand."""

import math

import pytest
import torch

from oqc.ops import reference


def test_rms_norm():
    y = reference.rms_norm(torch.tensor([3.0, 4.0], dtype=torch.float64), eps=0.0)
    assert y.tolist() == pytest.approx([3 / math.sqrt(12.5), 4 / math.sqrt(12.5)])


def test_rms_norm_of_zero_is_zero():
    assert reference.rms_norm(torch.zeros(3), eps=1e-6).tolist() == [0, 0, 0]


def test_half_precision_inputs_are_normalised_in_float32():
    u = torch.full((4,), 300.0, dtype=torch.float16)  # 300 * 300 overflows float16
    assert reference.quadratic(u, u, eps=1e-6).tolist() == pytest.approx([1.0] * 4)


def test_residual_removes_exactly_the_aligned_part():
    q, m = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 0.0])
    assert reference.residual(q, m, eps=0.0).tolist() == [0.0, 1.0]
    assert reference.orthogonalize(q, m, eps=0.0).tolist() == pytest.approx([0.0, math.sqrt(2)])


def test_rank_form():
    """Identity lift and projection, b = e1: the aligned component of q vanishes from the update."""
    eye = torch.eye(2, dtype=torch.float64)
    b, u, v = eye[:1], torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    parts = reference.update(b, u, v, lambda t: t @ eye, lambda t: t @ eye, space="rank", normalise=True, eps=0.0)
    assert parts.q.tolist()[0] == pytest.approx([1 / math.sqrt(2.5), 2 / math.sqrt(2.5)])
    assert parts.m.tolist()[0] == pytest.approx([math.sqrt(2), 0])
    assert parts.delta.tolist()[0] == pytest.approx([0, math.sqrt(2)])
    h = reference.inject(b, parts.delta, torch.tensor(0.5, dtype=torch.float64))
    assert h.tolist()[0] == pytest.approx([1, math.sqrt(0.5)])


def test_hidden_form_projects_after_the_lift():
    """q = e1 lifts to (1, 1) / sqrt 2: removing b = e1 there leaves e2, though q itself is parallel to b."""
    lift = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    b = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    u, v = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    parts = reference.update(b, u, v, lambda t: t @ lift.T, None, space="hidden", normalise=True, eps=0.0)
    assert parts.delta.tolist()[0] == pytest.approx([0, math.sqrt(2)])


def test_without_orthogonalisation_q_is_used_as_it_is():
    eye = torch.eye(2, dtype=torch.float64)
    u, v = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    parts = reference.update(eye[:1], u, v, lambda t: t @ eye, None, space="none", normalise=True, eps=0.0)
    assert parts.m is None
    assert torch.equal(parts.q, parts.q_perp)
    assert parts.delta.tolist()[0] == pytest.approx([3 / math.sqrt(12.5), 4 / math.sqrt(12.5)])


def test_readout():
    z = reference.readout(torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor(0.0))
    assert z.tolist() == [3.0]
