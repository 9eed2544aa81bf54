"""What came out of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]  # of an evaluation


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Accuracies are in percent of the test images; choices by test and by validation accuracy are kept apart.

    `best` is the best over all evaluations (the paper's figure), `final` the last, `at_best_val` the one at the
    evaluation with the best validation accuracy (None without a validation part). `images_per_s` counts training
    alone; `seconds` all but `prepare_seconds`, which went into compiling and capturing.
    """

    best: float
    final: float
    at_best_val: float | None
    parameters: int
    images_per_s: float
    seconds: float
    prepare_seconds: float
    epochs: int
    steps: int
    non_finite: int
    parameter_hash: str
    history: list[Row]


def best_row(history: list[Row]) -> Row:
    """The evaluation a user would choose: best by validation accuracy where there is one, else by test accuracy."""
    choice = "val_accuracy" if "val_accuracy" in history[0] else "test_accuracy"
    return max(history, key=lambda row: row[choice])


def summarise(history: list[Row], **measured: Any) -> Summary:
    """The summary of a whole history and of what was measured beside it."""
    last, chosen = history[-1], best_row(history)
    return Summary(
        best=max(row["test_accuracy"] for row in history),
        final=last["test_accuracy"],
        at_best_val=chosen["test_accuracy"] if "val_accuracy" in chosen else None,
        epochs=last["epoch"],
        steps=last["step"],
        non_finite=last["non_finite"],
        history=history,
        **measured,
    )
