"""Run records: one JSON object a line, one line a run. What every table and figure is made of.

A record has `preset`, `seed`, `best`, `final` (test accuracy in percent), `parameters`, `images_per_s`, `per_epoch`
(a list of test accuracies with their epoch), `mechanism` (overlap and gate statistics), `config` and `environment`.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
FIELDS = (
    "preset", "seed", "best", "final", "parameters", "images_per_s", "per_epoch", "mechanism", "config", "environment",
)  # fmt: skip


def read_records(path: Path) -> list[Record]:
    """The records of a file. A last line cut short by a kill is left out; anything else wrong is named."""
    if not path.is_file():
        raise ValueError(f"no results file at {path}")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path}, line {number}: not a JSON object") from None
        missing = [name for name in FIELDS if not isinstance(record, dict) or name not in record]
        if missing:
            raise ValueError(f"{path}, line {number}: the record has no {', '.join(missing)}")
        records.append(record)
    return records


def append_record(path: Path, record: Record) -> None:
    """Adds one record, on disk before this returns; a line that a kill cut short is dropped first."""
    assert all(name in record for name in FIELDS)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        whole = file.read().rpartition(b"\n")
        file.truncate(len(whole[0]) + len(whole[1]))
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a preset, in order of first appearance: mean and sample standard deviation over the seeds."""
    by_preset: dict[str, list[Record]] = {}
    for record in records:
        by_preset.setdefault(record["preset"], []).append(record)
    return [_row(preset, group) for preset, group in by_preset.items()]


def _row(preset: str, group: Sequence[Record]) -> dict[str, Any]:
    best = [record["best"] for record in group]

    def mean_of(name: str) -> float | None:
        values = [record["mechanism"].get(name) for record in group]
        return None if None in values else statistics.fmean(values)

    return {
        "preset": preset,
        "seeds": len(group),
        "mean": statistics.fmean(best),
        "std": statistics.stdev(best) if len(best) > 1 else None,
        "final": statistics.fmean(record["final"] for record in group),
        "parameters": group[0]["parameters"],
        "images_per_s": statistics.median(record["images_per_s"] for record in group),
        "before": mean_of("before"),
        "after": mean_of("after"),
        "chance": mean_of("chance"),
        "gate": mean_of("gate_mean"),
    }
