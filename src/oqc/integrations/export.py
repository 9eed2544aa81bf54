"""Models out of PyTorch's Python: ONNX and torch.export programs, with a dynamic batch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from oqc.files import as_path, check_folder
from oqc.integrations.wrappers import check_model


def to_onnx(model: nn.Module, path: str | Path, example: Tensor, *, size_step: int | None = None) -> None:
    """Writes an ONNX file that takes any number of images (`images` in, `output` out).

    `size_step` makes height and width dynamic too, in multiples of it: for backbones that take any size, such as
    timm's with `dynamic_img_size=True`, the patch size. Give an example of another size than the model's own, at which
    many models (timm's before 1.0.31) take their positions for constants.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ValueError("ONNX export needs onnx and onnxscript: pip install onnx onnxscript") from None
    model, batch, shapes = _prepared(model, path, example, size_step)
    with _quiet():
        if size_step is not None:
            _check_sizes(torch.export.export(model, (batch,), dynamic_shapes=(shapes,)), batch, size_step)
        torch.onnx.export(
            model,
            (batch,),
            str(path),
            input_names=["images"],
            output_names=["output"],
            dynamic_shapes=(shapes,),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def to_torch_export(model: nn.Module, path: str | Path, example: Tensor, *, size_step: int | None = None) -> None:
    """Writes a `torch.export` program; `torch.export.load(path).module()` runs it."""
    model, batch, shapes = _prepared(model, path, example, size_step)
    with _quiet():
        program = torch.export.export(model, (batch,), dynamic_shapes=(shapes,))
        if size_step is not None:
            _check_sizes(program, batch, size_step)
        torch.export.save(program, path)


def _prepared(
    model: nn.Module, path: str | Path, example: Tensor, size_step: int | None
) -> tuple[nn.Module, Tensor, dict[int, Any]]:
    """A frozen copy on the CPU, a batch of two (one would be taken for a constant), and what may vary. Makes the
    folder that the file goes to."""
    check_model(model)
    if not isinstance(example, Tensor):
        raise ValueError(f"example must be a tensor of images, got {type(example).__name__}")
    file = as_path("path", path)
    if file.is_dir():
        raise ValueError(f"path must name a file, got {file}, which is a folder")
    check_folder("path's folder", file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    batch = example.detach().cpu()[:1].repeat_interleave(2, 0)
    shapes: dict[int, Any] = {0: Dim("batch")}
    if size_step is not None:
        shapes |= {2: size_step * Dim("rows", min=2), 3: size_step * Dim("columns", min=2)}
    return model, batch, shapes


def _check_sizes(program: torch.export.ExportedProgram, batch: Tensor, step: int) -> None:
    """That a program holds for more than the size it was made with."""
    rows, columns = batch.shape[-2:]
    try:
        program.module()(batch.new_zeros(*batch.shape[:-2], rows + step, columns + 2 * step))
    except Exception as error:
        raise ValueError(
            f"made with an example of {rows} x {columns}, the program does not run at {rows + step} x"
            f" {columns + 2 * step}: pass an example of another size than the model's own, or leave out size_step"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's own deprecation warnings, which a caller can do nothing about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield
