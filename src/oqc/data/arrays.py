"""Sets that come as arrays: scikit-learn's digits and `.npz` files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from oqc.data.raw import Raw, divide

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
CHANNELS = (1, 3, 4)


def read_digits() -> Raw:
    """1,797 handwritten digits of 8 x 8 grey pixels, values 0..16 scaled to 0..255, a fixed fifth as the test part."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError(
            "the data set 'digits' comes with scikit-learn, which is missing: pip install scikit-learn"
        ) from None
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    return divide(images, digits.target.astype(np.int64), tuple(str(digit) for digit in digits.target_names))


def read_npz(path: Path) -> Raw:
    """x_train, y_train, x_test, y_test and, if there, classes; images uint8 as NHWC, NCHW or NHW."""
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        with file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # a damaged file can fail in any way
        why, _, _ = str(error).partition("\n")
        if "pickled" in why and not zipfile.is_zipfile(path):
            why = "it is no zip archive, as an .npz is"
        raise ValueError(f"{path} can't be read as .npz: {why}") from None
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise ValueError(f"{path} must hold the arrays {', '.join(REQUIRED)}, missing: {', '.join(missing)}")
    labels = {part: _labels(path, f"y_{part}", arrays[f"y_{part}"]) for part in ("train", "test")}
    if "classes" in arrays:
        classes = tuple(str(name) for name in arrays["classes"].ravel())
    else:
        count = int(labels["train"].max(initial=-1)) + 1
        if count > len(labels["train"]):
            raise ValueError(f"{path}: y_train has the label {count - 1}, but only {len(labels['train'])} images")
        classes = tuple(map(str, range(count)))
    return Raw(
        _images(path, "x_train", arrays["x_train"]),
        labels["train"],
        _images(path, "x_test", arrays["x_test"]),
        labels["test"],
        classes,
    )


def _images(path: Path, name: str, images: np.ndarray) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(f"{path}: {name} must be uint8 with 3 or 4 axes, got {images.dtype} {images.shape}")
    if images.ndim == 3:
        return images[:, None]
    if images.shape[3] in CHANNELS:
        return images.transpose(0, 3, 1, 2)
    if images.shape[1] in CHANNELS:
        return images
    raise ValueError(f"{path}: {name} must be NHWC or NCHW with 1, 3 or 4 channels, got {images.shape}")


def _labels(path: Path, name: str, labels: np.ndarray) -> np.ndarray:
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{path}: {name} must be whole numbers, got {labels.dtype}")
    labels = labels.astype(np.int64)
    return labels[:, 0] if labels.shape[1:] == (1,) else labels
