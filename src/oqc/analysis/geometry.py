"""The shape of the features before the head: how many directions they use, and how far apart the classes lie.

With l the eigenvalues of the covariance of n features [n, D] and p = l / sum l (formulas with words: docs/metrics.md):

    effective_rank = exp(-sum p log p)          participation_ratio = (sum l)^2 / sum l^2
    separation_centroids = root mean square of |mean_c - mean_c'| over two classes / of |x_i - mean_c(i)| over features
    separation_euclidean, _cosine, _cosine_centred = mean distance of pairs of two classes / of pairs of one class
    separation_scatter = sum_c n_c |mean_c - mean|^2 / sum_i |x_i - mean_c(i)|^2
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

METRICS = (
    "effective_rank", "participation_ratio", "separation_centroids", "separation_euclidean", "separation_cosine",
    "separation_cosine_centred", "separation_scatter",
)  # fmt: skip
CHUNK = 512


def geometry(features: Tensor, labels: Tensor) -> dict[str, float | None]:
    """The metrics of features [n, D] with labels [n], in float64; None where one is not defined.

    That is: anything for features that are not finite or all equal, a separation for a single class or where no class
    has two distinct features, one by cosines where a feature is zero.
    """
    features, labels = _tensor("features", features), _tensor("labels", labels)
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            "features must be [n, D] and labels [n] with the same n,"
            f" got {list(features.shape)} and {list(labels.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels must be whole numbers, one a class, got {labels.dtype}")
    x = features.detach().double()
    found: dict[str, float | None] = dict.fromkeys(METRICS)
    centred = x - x.mean(0)
    total = centred.square().sum()
    if not x.isfinite().all() or total <= _rounding(x):
        return found
    found |= _spectrum(centred)
    classes, index, sizes = labels.unique(return_inverse=True, return_counts=True)
    means = _class_sums(centred, index) / sizes[:, None]
    within = (centred - means[index]).square().sum()
    if len(classes) > 1 and within > _rounding(x):
        found["separation_centroids"] = float((_mean_square(means) / (within / len(x))).sqrt())
        found["separation_euclidean"] = _euclidean(centred, index, sizes)
        found["separation_cosine"] = _cosine(x, index, sizes)
        found["separation_cosine_centred"] = _cosine(centred, index, sizes)
        found["separation_scatter"] = float((total - within) / within)
    return found


def _tensor(what: str, given: object) -> Tensor:
    try:
        return torch.as_tensor(given)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"{what} must be a tensor or an array of numbers, got a {type(given).__name__}") from None


def _rounding(x: Tensor) -> Tensor:
    """What float64 may leave of a sum of squared deviations that is zero."""
    return x.square().sum() * torch.finfo(torch.float64).eps ** 2 * len(x)


def _class_sums(x: Tensor, index: Tensor) -> Tensor:
    """[classes, D], by a product: index_add would add in an order that varies on a GPU."""
    return F.one_hot(index).T.to(x) @ x


def _spectrum(centred: Tensor) -> dict[str, float]:
    eigenvalues = torch.linalg.eigvalsh(centred.T @ centred).clamp_min(0)
    share = eigenvalues / eigenvalues.sum()
    return {
        "effective_rank": float(torch.special.entr(share).sum().exp()),
        "participation_ratio": float(1 / share.square().sum()),
    }


def _pairs(sizes: Tensor) -> tuple[float, float]:
    """How many pairs lie within a class, and how many between two."""
    n = int(sizes.sum())
    within = float((sizes * (sizes - 1)).sum()) / 2
    return within, n * (n - 1) / 2 - within


def _mean_square(points: Tensor) -> Tensor:
    """Of the distances of all pairs."""
    return 2 * (points - points.mean(0)).square().sum() / (len(points) - 1)


def _euclidean(x: Tensor, index: Tensor, sizes: Tensor) -> float:
    """Over all pairs, a block of `CHUNK` rows at a time."""
    within = between = x.new_zeros(())
    for start in range(0, len(x), CHUNK):
        distances = torch.cdist(x[start : start + CHUNK], x[start:]).triu_(1)  # each pair once, none with itself
        same = index[start : start + CHUNK, None] == index[start:]
        inside = (distances * same).sum()
        within, between = within + inside, between + distances.sum() - inside
    pairs_within, pairs_between = _pairs(sizes)
    return float((between / pairs_between) / (within / pairs_within))


def _cosine(x: Tensor, index: Tensor, sizes: Tensor) -> float | None:
    """Distance 1 - cos. The cosines of all pairs of a set add up to (|sum u|^2 - sum |u|^2) / 2, u the unit vectors."""
    lengths = x.norm(dim=1, keepdim=True)
    if lengths.min() <= torch.finfo(torch.float64).eps * lengths.max():  # no direction
        return None
    unit = x / lengths
    squares = unit.square().sum()
    all_pairs = (unit.sum(0).square().sum() - squares) / 2
    same = (_class_sums(unit, index).square().sum() - squares) / 2
    pairs_within, pairs_between = _pairs(sizes)
    within, between = pairs_within - same, pairs_between - (all_pairs - same)
    if within <= torch.finfo(torch.float64).eps * len(x) * pairs_within:
        return None
    return float((between / pairs_between) / (within / pairs_within))
