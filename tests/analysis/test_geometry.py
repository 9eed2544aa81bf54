import importlib
import math

import pytest
import torch

from oqc.analysis.geometry import METRICS, geometry

SEPARATIONS = [name for name in METRICS if name.startswith("separation")]


def random_case(n=70, d=6, classes=4):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, d, generator=g) + 2, torch.randint(classes, (n,), generator=g)


def test_spectrum_worked_out_by_hand():
    # Two directions with variances in the ratio 9 : 1, so shares 0.9 and 0.1; the mean (5, -2, 7) plays no part.
    x = torch.tensor([[3.0, 0, 0], [-3, 0, 0], [0, 1, 0], [0, -1, 0]]) + torch.tensor([5.0, -2, 7])
    got = geometry(x, torch.tensor([0, 0, 1, 1]))
    assert got["effective_rank"] == pytest.approx(math.exp(-0.9 * math.log(0.9) - 0.1 * math.log(0.1)), rel=1e-12)
    assert got["participation_ratio"] == pytest.approx(1 / 0.82, rel=1e-12)


def test_equal_variances_count_the_dimensions():
    x = torch.cat([torch.eye(5), -torch.eye(5)])
    got = geometry(x, torch.arange(10) % 2)
    assert got["effective_rank"] == pytest.approx(5)
    assert got["participation_ratio"] == pytest.approx(5)


def test_separation_worked_out_by_hand():
    # A 3-4-5 rectangle: classes are its short sides. Within: 3, 3. Between: 4, 4, 5, 5.
    x = torch.tensor([[0.0, 0], [0, 3], [4, 0], [4, 3]])
    got = geometry(x, torch.tensor([7, 7, 2, 2]))
    assert got["separation_euclidean"] == pytest.approx(4.5 / 3, rel=1e-12)
    assert got["separation_scatter"] == pytest.approx(4 * 2**2 / (4 * 1.5**2), rel=1e-12)
    # Centroids (0, 1.5) and (4, 1.5), and every corner 1.5 from its own.
    assert got["separation_centroids"] == pytest.approx(4 / 1.5, rel=1e-12)
    # Centred, the corners are (±2, ±1.5), of squared length 6.25. Within: cos = (4 - 2.25) / 6.25 = 0.28, twice.
    # Between: (-4 + 2.25) / 6.25 = -0.28 twice, -1 twice.
    assert got["separation_cosine_centred"] == pytest.approx((1.28 + 2) / 2 / 0.72, rel=1e-12)


def test_separation_of_classes_of_different_sizes_worked_out_by_hand():
    # On a line: class 0 at -1 and 1, class 1 at 2, class 2 at 4, 5, 6. Centroids 0, 2, 5: distances 2, 3, 5.
    x = torch.tensor([[-1.0], [1], [2], [4], [5], [6]])
    got = geometry(x, torch.tensor([0, 0, 1, 2, 2, 2]))
    assert got["separation_centroids"] == pytest.approx(((4 + 9 + 25) / 3 / ((1 + 1 + 1 + 1) / 6)) ** 0.5, rel=1e-12)


def test_separation_by_centroids_follows_from_the_scatter_where_classes_are_of_one_size():
    x, labels = random_case()[0], torch.arange(70) % 7
    got = geometry(x, labels)
    assert got["separation_centroids"] == pytest.approx((2 * 7 / 6 * got["separation_scatter"]) ** 0.5, rel=1e-12)


def test_cosine_separation_worked_out_by_hand():
    # Right angles within a class; between: 0, 90, 180 and 90 degrees. Lengths play no part.
    x = torch.tensor([[1.0, 0], [0, 2], [3, 0], [0, -4]])
    assert geometry(x, torch.tensor([0, 0, 1, 1]))["separation_cosine"] == pytest.approx((0 + 1 + 2 + 1) / 4 / 1)


def test_blocks_of_pairs_agree_with_a_plain_double_loop(monkeypatch):
    x, labels = random_case()
    u = torch.nn.functional.normalize(x.double(), dim=1)
    distances = {"separation_euclidean": [[], []], "separation_cosine": [[], []]}
    for i in range(len(x)):
        for j in range(i):
            same = int(labels[i] == labels[j])
            distances["separation_euclidean"][same].append((x[i].double() - x[j].double()).norm().item())
            distances["separation_cosine"][same].append(1 - (u[i] @ u[j]).item())
    monkeypatch.setattr(importlib.import_module("oqc.analysis.geometry"), "CHUNK", 16)  # 70 is no multiple of it
    got = geometry(x, labels)
    for name, (between, within) in distances.items():
        want = (sum(between) / len(between)) / (sum(within) / len(within))
        assert got[name] == pytest.approx(want, rel=1e-10)


def test_neither_order_nor_scale_matters():
    x, labels = random_case()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert geometry(1e-3 * x[order], labels[order]) == pytest.approx(geometry(x, labels), rel=1e-5)


def test_where_it_is_not_defined_it_is_none():
    x, labels = random_case()
    one_class = geometry(x, torch.zeros_like(labels))
    alone = geometry(x[:4], torch.arange(4))
    for got in (one_class, alone):
        assert {name for name, value in got.items() if value is None} == set(SEPARATIONS)
    assert set(geometry(torch.full_like(x, 0.1), labels).values()) == {None}
    zero = geometry(torch.cat([torch.zeros_like(x[:1]), x[1:]]), labels)  # has no direction, yet a distance
    assert {name for name, value in zero.items() if value is None} == {"separation_cosine"}
    assert set(geometry(x.masked_fill(labels[:, None] == 0, math.nan), labels).values()) == {None}


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"got \[4, 2, 3\] and \[4\]"):
        geometry(torch.zeros(4, 2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match=r"got \[4, 2\] and \[5\]"):
        geometry(torch.zeros(4, 2), torch.zeros(5))


def test_what_is_not_features_or_labels_is_named():
    x, labels = random_case()
    with pytest.raises(ValueError, match=r"^labels must be whole numbers, one a class, got torch\.float32$"):
        geometry(x, torch.randn(len(x)))
    with pytest.raises(ValueError, match=r"^features must be a tensor or an array of numbers, got a str$"):
        geometry("a", labels)
    with pytest.raises(ValueError, match=r"^labels must be a tensor or an array of numbers, got a str$"):
        geometry(x, "b")
