"""Writes what the documents say of our runs, from results/cifar100/runs.jsonl: `make results`.

docs/results.md with docs/figures/, the README's table between its markers, and the line `Ours: ...` in the docstring of
each preset. Without a results file everything says that it is not run yet. tests/test_documents.py holds the files to
this.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from oqc.experiments import comparison, findings
from oqc.experiments.claims import AFBO
from oqc.experiments.comparison import Comparison, published_speed
from oqc.experiments.published import difference, value
from oqc.experiments.results import Page, results_page
from oqc.experiments.sections import NOT_RUN, is_calibrated, missing, title_of
from oqc.experiments.suites import RESULTS, SUITES
from oqc.experiments.wording import interval
from oqc.files import write_whole
from oqc.report import Record, finished, read_records, rows
from oqc.report.markdown import markdown_table, number, plural, signed, spread
from oqc.report.provenance import diverged_line, machine_of
from oqc.report.records import is_timed
from oqc.report.statistics import Finding

ROOT = Path(__file__).resolve().parent.parent
README, PRESETS = "README.md", "src/oqc/experiments/presets.py"
MARKERS = "<!-- results -->\n", "<!-- /results -->\n"


def records_of(root: Path) -> list[Record]:
    path = root / "results" / comparison.DATA / RESULTS
    return read_records(path) if path.exists() else []


def documents(root: Path) -> tuple[Page, dict[str, str]]:
    """The page of docs/, and the files that hold generated parts, by path below `root`."""
    records = records_of(root)
    readme, presets = ((root / name).read_text(encoding="utf-8") for name in (README, PRESETS))
    block = readme_block(comparison.compare(records))
    return results_page(records), {README: with_block(readme, block), PRESETS: with_receipts(presets, records)}


def readme_block(of: Comparison) -> str:
    """Table 1, ours beside the paper's, and how the claims stand."""
    columns = (
        "Model", "Parameters", "Paper (%)", "Ours (%)", "Paper's gain", "Our gain [95%]", "Paper's speed", "Our speed"
    )  # fmt: skip
    body = []
    for preset in SUITES["table1"]:
        paper, base = value("table 1", preset), value("table 1", AFBO)
        row, gain = of.rows.get(preset), of.gain(preset) if preset != AFBO else None
        body.append(
            [
                title_of(preset),
                f"{value('table 1', preset, 'parameters_m').mean:.2f} M",
                spread(paper.mean, paper.std),
                spread(row["mean"], row["std"]) if row else missing(preset, of.diverged),
                signed(difference(paper, base)) if preset != AFBO else "",
                interval(gain) if gain else "",
                number(published_speed(preset)),
                number(of.speed(preset)),
            ]
        )
    return f"{_wrapped(_lead(of))}\n\n{markdown_table(columns, body)}\n{_verdicts(of)}\n"


def _lead(of: Comparison) -> str:
    text = "Best test accuracy on CIFAR-100, Deep-ViT with penultimate-residual readout"
    seeds = sorted({row["seeds"] for preset in SUITES["table1"] if (row := of.rows.get(preset))})
    if not seeds:
        return f"{text}. Ours are {NOT_RUN}."
    many = plural(seeds[-1], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    how = "by one protocol" + (", calibrated on AFBO+PR alone" if is_calibrated(of) else "")
    return (
        f"{text}; ours over {many} on {machine(of.frozen)}, {how}. Gain is over AFBO+PR; speed is training throughput"
        " as a share of AFBO+PR's, with the kernels as they were when the runs were made."
        + f" {diverged_line([*of.records, *of.diverged])}".rstrip()
    )


def _verdicts(of: Comparison) -> str:
    asked = findings.of_paper(of)
    if not any(isinstance(found, Finding) for found in of.findings.values()):
        return f"[docs/results.md](docs/results.md) lists the {len(asked)} claims that the runs will test."
    told = (
        findings.gains(of),
        findings.contradicted(of),
        *findings.central(of),
        f"**Of {len(asked)} claims of the paper**: {findings.counts(asked)}.{findings.late(of)} *Reproduced* or"
        " *contradicted*: the 95% interval of the claim's own difference excludes 0. *Same sign* or *other sign*: it"
        " contains 0, and nothing is settled.",
    )
    points = "\n".join(_wrapped(f"- {one.strip()}", indent="  ") for one in told if one.strip())
    rest = "has every table, claim and figure, what does not hold, and what the verdicts rest on"
    return f"{points}\n\n[docs/results.md](docs/results.md) {rest}."


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)


def machine(records: Sequence[Record]) -> str:
    """`one NVIDIA H200`, or what there was."""
    return " or ".join(f"one {name}" for name in dict.fromkeys(map(machine_of, records)))


def with_block(readme: str, block: str) -> str:
    first, last = MARKERS
    if readme.count(first) != 1 or readme.count(last) != 1:
        raise ValueError(f"{README} must have one line {first.strip()} and one line {last.strip()}")
    head, _, rest = readme.partition(first)
    return head + first + block + last + rest.partition(last)[2]


def with_receipts(presets: str, records: Sequence[Record]) -> str:
    """The source of the presets with our accuracy in each docstring."""
    by_preset = {row["preset"]: row for row in rows(records)}

    def receipt(match: re.Match[str]) -> str:
        row = by_preset.get(match["name"])
        if row is None:
            return f"{match['head']}Ours: {missing(match['name'], records)}."
        own = [record for record in finished(records) if record["preset"] == match["name"]]
        found = f"{spread(row['mean'], row['std'])} over {plural(row['seeds'], 'seed')}"
        if row["seconds"] is not None:
            found += f", {row['seconds']:.0f} s a run{_side_by_side(own)} on {machine(own)}"
        elif any(record.get("shared_device") for record in own):
            found += f", beside other work on {machine(own)}"
        return f"{match['head']}Ours: {found}."

    return re.sub(
        r'(?P<head>def (?P<name>\w+)\(\) -> Run:\n    """(?:(?!""").)*?)Ours: [^\n"]*', receipt, presets, flags=re.S
    )


def _side_by_side(records: Sequence[Record]) -> str:
    """How many runs at a time the seconds are a share of, where it is more than one."""
    at_once = {record.get("at_once", 1) for record in records if is_timed(record)}
    if at_once == {1}:
        return ""
    return f", {max(at_once)} side by side," if len(at_once) == 1 else f", up to {max(at_once)} side by side,"


def main() -> None:
    page, files = documents(ROOT)
    page.write(ROOT / "docs")
    for name, text in files.items():
        if (ROOT / name).read_text(encoding="utf-8") != text:
            write_whole(ROOT / name, text)
    print(f"{plural(len(records_of(ROOT)), 'run')}: docs/results.md, {', '.join([*page.figures, *files])}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
