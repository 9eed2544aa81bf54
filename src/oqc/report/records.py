"""Run records: one JSON object a line, one line a run. What every table and figure is made of.

A record has `preset`, `seed`, `best`, `final` (test accuracy in percent), `parameters`, `images_per_s`, `per_epoch`
(a list of test accuracies with their epoch), `mechanism` (the metrics of docs/metrics.md), `config` and `environment`;
runs of a suite also have `seconds` (training and evaluation), `setup_seconds` (before it), `at_once`, how many runs
shared the device, `wall_seconds`, what the suite took since the record before (or its start), and on a GPU
`images_per_s_alone`, of bare steps before the run, where nothing else used the device. `shared_device` says that other
work used it meanwhile: the run's speed and seconds then stand in no table. `note` says what was done by hand.

A run that diverged has `diverged`, the epoch and the step at which it was stopped, and no accuracy, size, speed or
mechanism: it is counted and named, and stands in no mean.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from oqc.files import naming

Record = dict[str, Any]
FIELDS: dict[str, type | tuple[type, ...]] = {
    "preset": str,
    "seed": int,
    "best": (int, float),
    "final": (int, float),
    "parameters": int,
    "images_per_s": (int, float),
    "per_epoch": list,
    "mechanism": dict,
    "config": dict,
    "environment": dict,
}
MAY_HAVE: dict[str, type | tuple[type, ...]] = {
    "seconds": (int, float),
    "setup_seconds": (int, float),
    "wall_seconds": (int, float),
    "images_per_s_alone": (int, float),
    "at_once": int,
    "shared_device": bool,
    "note": str,
}
DIVERGED = {"diverged": dict} | {n: FIELDS[n] for n in ("preset", "seed", "per_epoch", "config", "environment")}
MECHANISM = (
    "before", "after", "chance", "hidden_cosine", "gate_mean", "gate_std", "gate_token_std", "effective_rank",
    "participation_ratio", "separation_centroids", "separation_euclidean", "separation_cosine",
    "separation_cosine_centred", "separation_scatter",
)  # fmt: skip


def read_records(path: Path) -> list[Record]:
    """The records of a file, one a (preset, seed). A last line cut short by a kill is left out; anything else wrong is
    named."""
    if not path.is_file():
        raise ValueError(f"no results file at {path}")
    lines = path.read_bytes().splitlines(keepends=True)
    records: list[Record] = []
    seen: dict[tuple[str, int], int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and not line.endswith(b"\n"):
                break
            raise ValueError(f"{path}, line {number}: not a JSON object") from None
        fault = _fault(record)
        if fault:
            raise ValueError(f"{path}, line {number}: {fault}")
        run = record["preset"], record["seed"]
        if run in seen:
            raise ValueError(f"{path}, line {number}: {run[0]}, seed {run[1]} is in line {seen[run]} already")
        seen[run] = number
        records.append(record)
    return records


def _fault(record: Any) -> str:
    """What keeps an object from being a record, or nothing."""
    fields = _fields(record)
    missing = [name for name in fields if not isinstance(record, dict) or name not in record]
    if missing:
        return f"the record has no {', '.join(missing)}"
    for name, kind in (fields | {name: kind for name, kind in MAY_HAVE.items() if name in record}).items():
        value = record[name]
        if not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
            return f"{name} cannot be {value!r}"
        if isinstance(value, bool) is not (kind is bool) or (name == "at_once" and value == 0):
            return f"{name} cannot be {value!r}"
    for name, kind in {"versions": dict, "gpu": str, "commit": str, "python": str}.items():
        if not isinstance(record["environment"].get(name), (kind, type(None))):
            return f"{name} of environment cannot be {record['environment'][name]!r}"
    if not isinstance(record["config"].get("data", {}), dict):
        return f"data of config cannot be {record['config']['data']!r}"
    for point in record["per_epoch"]:
        if not isinstance(point, dict) or not _are_numbers(point.get("epoch"), point.get("test")):
            return f"per_epoch cannot have {point!r}"
    if fields is DIVERGED:
        sound = _are_numbers(record["diverged"].get("epoch"), record["diverged"].get("step"))
        return "" if sound else f"diverged cannot be {record['diverged']!r}"
    for name, value in record["mechanism"].items():
        if value is not None and not _are_numbers(value):
            return f"{name} of mechanism cannot be {value!r}"
    return ""


def _fields(record: Any) -> dict[str, type | tuple[type, ...]]:
    return DIVERGED if isinstance(record, dict) and "diverged" in record else FIELDS


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)


def append_record(path: Path, record: Record) -> None:
    """Adds one record, on disk before this returns. A line that a kill cut short is dropped first; one that lacks no
    more than its end is kept."""
    assert all(name in record for name in _fields(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("ab+") as file:
        file.seek(0)
        before, end, last = file.read().rpartition(b"\n")
        whole = _is_whole(last)
        if not whole:
            file.truncate(len(before) + len(end))
        file.write((b"\n" if whole else b"") + json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def finished(records: Iterable[Record]) -> list[Record]:
    """Those that did not diverge."""
    return [record for record in records if "diverged" not in record]


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row a preset, in order of first appearance: mean and sample standard deviation over its finished runs. Speeds
    of several machines or versions of the code are not set beside each other: no row has one then."""
    by_preset: dict[str, list[Record]] = {}
    for record in finished(records):
        by_preset.setdefault(record["preset"], []).append(record)
    places = [record["environment"] for record in finished(records) if speed_of(record) is not None]
    several = len({(place.get("gpu"), place.get("commit")) for place in places}) > 1
    found = [_row(preset, group) for preset, group in by_preset.items()]
    return [row | {"images_per_s": None} for row in found] if several else found


def speed_of(record: Record) -> float | None:
    """The model's own training throughput, as measured alone. A run on a GPU that lacks it trained beside another or
    beside the compiler; on a CPU a run has its core to itself."""
    if record.get("shared_device"):
        return None
    alone: float | None = record.get("images_per_s_alone")
    return record["images_per_s"] if alone is None and record["environment"].get("device") != "cuda" else alone


def is_timed(record: Record) -> bool:
    """Whether its seconds are those of such a run: it had the device for itself and its like."""
    return "seconds" in record and not record.get("shared_device")


def _row(preset: str, group: Sequence[Record]) -> dict[str, Any]:
    best = [record["best"] for record in group]

    def mean_of(name: str) -> float | None:
        values = [record["mechanism"].get(name) for record in group]
        return None if None in values else statistics.fmean(values)

    speeds = [speed for speed in map(speed_of, group) if speed is not None]
    seconds = [record["seconds"] / record.get("at_once", 1) for record in group if is_timed(record)]
    return {
        "preset": preset,
        "seeds": len(group),
        "mean": statistics.fmean(best),
        "std": statistics.stdev(best) if len(best) > 1 else None,
        "final": statistics.fmean(record["final"] for record in group),
        "parameters": group[0]["parameters"],
        "images_per_s": statistics.median(speeds) if speeds else None,
        "seconds": statistics.median(seconds) if seconds else None,
    } | {name: mean_of(name) for name in MECHANISM}
