"""Where runs come from, in words: machine, versions, commits, and how they were trained. From their records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from oqc.config import Data, Run, Train, from_dict
from oqc.report.markdown import plural
from oqc.report.records import Record

NOT_RECORDED = "not recorded"


def config_of(record: Record) -> Run:
    try:
        return from_dict(Run, record["config"])
    except ValueError as error:
        where = f"the record of {record['preset']}, seed {record['seed']}"
        raise ValueError(f"{where} has a config that cannot be read: {error}") from None


def protocol_of(run: Run) -> tuple[Train, Data]:
    """Equal for all runs that are trained alike, whatever their model and seed and however the step is computed."""
    usual = Train()
    free = {name: getattr(usual, name) for name in ("seed", "mode", "backend", "tf32", "deterministic", "nan_limit")}
    return replace(run.train, **free), replace(run.data, root=None)


def training_line(record: Record) -> str:
    """The protocol of a record: `50 epochs, batch 512, ...`."""
    if not record["config"]:
        return NOT_RECORDED
    train, data = protocol_of(config_of(record))
    warmup = min(train.warmup, train.epochs / 2)  # as training has it
    parts = [
        plural(train.epochs, "epoch"),
        f"batch {train.batch}",
        f"AdamW at {train.lr:g}",
        f"weight decay {train.weight_decay:g}",
        f"{warmup:g} epoch{'' if warmup == 1 else 's'} of warmup, then cosine",
        f"clipping at {train.clip:g}" if train.clip else "no clipping",
        f"label smoothing {train.smoothing:g}" if train.smoothing else "",
        f"random crop (pad {data.crop})" if data.crop else "no crop",
        "flip" if data.flip else "no flip",
        *(f"{name} {getattr(data, name):g}" for name in ("cutout", "mixup", "cutmix") if getattr(data, name)),
        train.precision,
    ]
    return ", ".join(part for part in parts if part)


def environment_line(records: Sequence[Record], *, commits: bool = True) -> str:
    """Machine, versions and commits of all records, each with its number of runs where there are several."""
    found = [record["environment"] for record in records]
    parts = [_count([machine_of(record) for record in records])]
    for name in ("torch", "triton", "oqc"):
        parts.append(_count([one.get("versions", {}).get(name) for one in found], f"{name} "))
    parts.append(_count([one.get("python") for one in found], "Python "))
    if commits:
        parts.append(_count([_short(one.get("commit")) for one in found], "commit "))
    return ", ".join(part for part in parts if part)


def diverged_line(records: Sequence[Record]) -> str:
    """Which of the runs diverged and what that means for the rest; nothing where none did."""
    found = [record for record in records if "diverged" in record]
    if not found:
        return ""
    named = ", ".join(f"{one['preset']} (seed {one['seed']}, in epoch {one['diverged']['epoch']})" for one in found)
    are = "is" if len(found) == 1 else "are"
    return f"{len(found)} of {plural(len(records), 'run')} diverged and {are} in no mean and no claim: {named}."


def machine_of(record: Record) -> str:
    """The GPU's name, or CPU."""
    return record["environment"].get("gpu") or "CPU"


def commit_of(record: Record) -> str:
    return _short(record["environment"].get("commit")) or NOT_RECORDED


def _short(commit: str | None) -> str | None:
    """Seven digits, and whether files differed from it."""
    return commit and commit[:7] + ("+changes" if commit.endswith("+changes") else "")


def _count(values: Sequence[str | None], prefix: str = "") -> str:
    found = Counter(value for value in values if value)
    if len(found) == 1 and found.total() == len(values):
        return prefix + next(iter(found))
    return " and ".join(f"{prefix}{value} ({plural(n, 'run')})" for value, n in found.most_common())
