"""Reads the pickles of the official CIFAR archives, and nothing that a pickle could call.

Those files were written by Python 2 and hold dicts of bytes, lists, numbers and numpy arrays. Only the constructors
that such arrays need are admitted, each with the arguments numpy writes; any other global is an error.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

_NDARRAY = object()  # stands for the class: it is named, never called


def _array(kind: object, shape: tuple[int, ...], code: bytes | str) -> np.ndarray:
    """What numpy's `_reconstruct` gives: an empty array, whose content comes next in the pickle."""
    if kind is not _NDARRAY or shape != (0,) or code not in (b"b", "b"):
        raise ValueError("an array is not built as numpy writes it")
    return np.empty(0, dtype=np.int8)


def _dtype(code: bytes | str, align: int = 0, copy: int = 1) -> np.dtype:
    dtype = np.dtype(code.decode("ascii") if isinstance(code, bytes) else code)
    if dtype.kind not in "biuf":
        raise ValueError(f"dtype {code!r} is not a number's")
    return np.dtype(dtype, align=bool(align), copy=bool(copy))


def _encode(text: str, encoding: bytes | str = "latin1") -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"encoding {encoding!r} is not latin1")
    return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise ValueError(f"it asks for {module}.{name}, which no data set needs; the file is not trusted")
        return _ADMITTED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("it refers to objects outside the file; the file is not trusted")


def loads(data: bytes, origin: str) -> dict[bytes, Any]:
    """The dict in a pickle, or a ValueError that names `origin`."""
    try:
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(f"{origin} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{origin} must hold a dict, got {type(content).__name__}")
    return {key.encode() if isinstance(key, str) else key: value for key, value in content.items()}
