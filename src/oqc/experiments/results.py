"""The page of a results file: what holds, tables with the paper's values, mechanism, claims, calibration, figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oqc.experiments import comparison, findings
from oqc.experiments.claims import AFBO, COMPLEMENTS, OURS, SECTIONS
from oqc.experiments.comparison import Comparison
from oqc.experiments.presets import PRESETS
from oqc.experiments.sections import (
    SUITE_SECTIONS,
    calibration_section,
    is_calibrated,
    measured,
    mechanism_section,
    suite_section,
    title_of,
)
from oqc.files import write_whole
from oqc.report import Record, finished, paper_figures, rows, table
from oqc.report.figures import COLORS, accuracy_over_epochs
from oqc.report.markdown import literal, markdown_table, plural
from oqc.report.provenance import (
    commit_of,
    config_of,
    diverged_line,
    environment_line,
    machine_of,
    protocol_of,
    training_line,
)
from oqc.report.records import is_timed
from oqc.report.statistics import Finding

FIGURES = "figures"  # the folder beside the page
MARK = "<!-- Written by `oqc report`; edits are lost. -->"
CAPTIONS = {
    "claims": "Every claim on accuracy: the difference with its 95% interval, turned so that the side it names is on"
    " the right. Large: p below 0.05 after Holm's correction too.",
    "rank-sweep": "Gain by rank; points of one rank stand side by side. Ours filled, with 95% intervals of the gain;"
    " the paper's hollow, with the ± of the row, full's from its sweep and low-rank's one from table 1.",
    "pareto": "Gain against training throughput, which the paper's is read as. Ours filled, with 95%"
    " intervals of the gain; the paper's hollow, with the ± of the row.",
    "mechanism": "The paper's mechanism figure. Ours filled, the paper's hollow; (b) has a panel for each, (c) is cut"
    " at 0, and its spread is over tokens and blocks: a scalar gate has one over blocks. The paper has no overlap of"
    " OQC full, and two gates, dynamic's and one that it does not name: drawn as static's.",
    "accuracy": "Mean test accuracy by epoch; bands reach from the lowest to the highest seed.",
}


_TABLES = (
    "Best test accuracy over training in percent, as the paper reports it, mean ± standard deviation over the seeds;"
    " final is the mean after the last epoch. Gain is the seed-paired difference from AFBO+PR, where nothing else is"
    " said, over the seeds that both have, so it may differ from that of the means. Speed is training throughput as a"
    " share of AFBO+PR's, measured by the same version of the code. The kernels grew faster between runs: where no"
    " such version trained AFBO+PR too, no speed is given, and images/s stand with the version's commit, to be compared"
    " with that version's alone. The paper does not say that its throughput is of training: we read it so. The paper's"
    " parameters, images/s and speed stand in brackets. Intervals rest on one variance, pooled over all models, so that"
    " a row of one seed has one too.\n"
)
_NAMES = (
    "AFBO+PR is the paper's baseline: a bilinear feed-forward network (AFBO) in a vision transformer with"
    " penultimate-residual readout (PR). OQC full, OQC-LR (low-rank), OQC-static and OQC-dynamic add a complement to"
    " it, R is the rank of its branch. The paper's second data set, TinyImageNet (table 2), is not rerun: `oqc train"
    " --preset tiny_imagenet_dynamic_r83` and its like train those models.\n"
)
_SMALL = (
    "The CIFAR-100 presets shrunk to 8 x 8 digits, width, depth and rank in proportion; names keep the rank of the full"
    " size. They show that every part runs: 359 test images settle no question of accuracy.\n"
)


@dataclass(frozen=True)
class Page:
    """Markdown, and the SVG figures it shows by their path beside it."""

    text: str
    figures: dict[str, str]

    def write(self, folder: Path) -> list[Path]:
        """Writes results.md and its figures, and removes those of an earlier page that it no longer has. A results.md
        of somebody else is not touched."""
        page = folder / "results.md"
        earlier = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
        if page.is_dir() or (earlier and MARK not in earlier):
            what = "is a folder" if page.is_dir() else "is not of `oqc report`"
            raise ValueError(f"{page} {what}; name another folder with --out")
        for name in CAPTIONS:
            path = f"{FIGURES}/{name}.svg"
            if path not in self.figures and f"({path})" in earlier:
                (folder / path).unlink(missing_ok=True)
        for name, text in {**self.figures, "results.md": self.text}.items():
            write_whole(folder / name, text)
        return [folder / name for name in ("results.md", *self.figures)]


def results_page(records: Sequence[Record]) -> Page:
    """Claims and the paper's tables where the records are of CIFAR-100 presets, else a plain table."""
    if records and not any(_is_of_suites(record) for record in records):
        return _plain_page(records)
    of = comparison.compare([record for record in records if _is_of_suites(record)])
    figures = _figures(of)
    show = {name: _shown(name) for name in figures}
    parts = [
        "# The paper's CIFAR-100 results, rerun\n",
        f"{MARK}\n",
        _how(of),
        diverged_line(records),
        findings.summary(of),
        measured(of),
        findings.positive(of) + show.get("claims", ""),
        findings.negative(of),
        findings.another_size(of),
        "## Tables\n",
        _TABLES + _shared(of) + _left_out(of),
        *(suite_section(of, suite) for suite in SUITE_SECTIONS[:-2]),
        *(show[name] for name in ("rank-sweep", "pareto") if name in show),
        *(suite_section(of, suite) for suite in SUITE_SECTIONS[-2:]),
        mechanism_section(of) + show.get("mechanism", ""),
        findings.claim_tables(of),
        calibration_section(of),
        _provenance(of),
    ]
    others = [record for record in finished(records) if not _is_of_suites(record)]
    if others:
        names = dict.fromkeys(record["config"].get("data", {}).get("name", "an unnamed data set") for record in others)
        lead = f"On {' and '.join(names)}, or of no preset: no part of what stands above. {_trained(others)}"
        parts.append(f"## Other runs\n\n{lead}\n{markdown_table(*table(rows(others)))}")
    text = "\n".join(part.strip("\n") + "\n" for part in parts if part)
    return Page(text, {f"{FIGURES}/{name}.svg": svg for name, svg in figures.items()})


def _shared(of: Comparison) -> str:
    count = sum(bool(record.get("shared_device")) for record in of.records)
    return f"\n{plural(count, 'run')} shared the device with other work: no speed counts them.\n" if count else ""


def _wall(of: Comparison) -> str:
    """What a suite takes beside its runs' own time: to build, compile, measure and write."""
    timed = [r for r in of.records if "wall_seconds" in r and is_timed(r) and r["environment"].get("device") == "cuda"]
    if not timed:
        return ""
    wall, total, setup = (sum(r.get(name, 0.0) for r in timed) for name in ("wall_seconds", "seconds", "setup_seconds"))
    own = sum(record["seconds"] / record.get("at_once", 1) for record in timed)
    beside = ", those side by side counted by their shares" if own < total else ""
    rest = f"; of the rest {min(1.0, setup / (wall - own)):.0%} is building and compiling" if wall > own else ""
    return (
        f"\nThe suites took {wall / own:.2f} times as long as their runs trained and evaluated, over"
        f" {plural(len(timed), 'run')}{beside}{rest}.\n"
    )


def _left_out(of: Comparison) -> str:
    if not of.left_out:
        return ""
    named = ", ".join(f"{record['preset']} (seed {record['seed']})" for record in of.left_out)
    return f"\nOf another schedule than AFBO+PR's or another model than their preset's, and left out: {named}.\n"


def _is_of_suites(record: Record) -> bool:
    return record["preset"] in PRESETS and record["config"].get("data", {}).get("name") == comparison.DATA


def _plain_page(records: Sequence[Record]) -> Page:
    """Any other file: one table, and the accuracy over epochs where the lines can be told apart."""
    name = records[0]["config"].get("data", {}).get("name", "runs")
    small = f"{_SMALL}\n" if name == "digits" and any(record["preset"] in PRESETS for record in records) else ""
    order = {preset: place for place, preset in enumerate(PRESETS)}
    found = sorted(rows(records), key=lambda row: order.get(row["preset"], len(order)))
    diverged = f"{line}\n\n" if (line := diverged_line(records)) else ""
    text = f"# Results: {name}\n\n{MARK}\n\n{_trained(records)}\n{diverged}{small}{markdown_table(*table(found))}"
    records = finished(records)
    presets = {record["preset"] for record in records}
    curves = {(record["preset"], len(record["per_epoch"])) for record in records}
    few = 0 < len(presets) <= len(COLORS)
    if not few or len(curves) > len(presets) or not all(epochs for _, epochs in curves):
        return Page(text, {})
    return Page(text + _shown("accuracy"), {f"{FIGURES}/accuracy.svg": accuracy_over_epochs(records)})


def _shown(name: str) -> str:
    """A figure with its caption."""
    return f"\n![{name.replace('-', ' ')}]({FIGURES}/{name}.svg)\n\n*{CAPTIONS[name]}*\n"


def _trained(records: Sequence[Record]) -> str:
    return f"{_runs(records)}. Training: {_training(records)}.\n"


def _training(records: Sequence[Record]) -> str:
    return "; ".join(dict.fromkeys(map(training_line, records)))


def _provenance(of: Comparison) -> str:
    """Machine, versions and commits of every run that the page tells of."""
    told = [record for record in of.records if record not in of.left_out]
    if not told:
        return ""
    by_commit: dict[str, list[str]] = {}
    for record in told:
        by_commit.setdefault(commit_of(record), []).append(title_of(record["preset"]))
    body = []
    for commit, titles in by_commit.items():
        models = ", ".join(f"{title} ({n})" for title, n in Counter(titles).items())
        body.append([commit, str(len(titles)), models])
    shown = markdown_table(("Commit", "Runs", "Models"), body, words=("Models",))
    return f"## Provenance\n\n{_runs(told, commits=len(by_commit) == 1)}.\n\n{shown}{_wall(of)}{_notes(told)}"


def _notes(records: Sequence[Record]) -> str:
    """What was done to records by hand."""
    found = Counter((record["note"], title_of(record["preset"])) for record in records if record.get("note"))
    lines = [f"- {title} ({plural(n, 'run')}): {literal(note)}.\n" for (note, title), n in found.items()]
    return f"\nChanged by hand:\n\n{''.join(lines)}" if lines else ""


def _runs(records: Sequence[Record], *, commits: bool = True) -> str:
    return f"{plural(len(records), 'run')} on {environment_line(records, commits=commits)}"


def _how(of: Comparison) -> str:
    if not of.records:
        return "" if of.diverged else "Nothing is run yet: `oqc reproduce all` and `make results` fill this page.\n"
    if not of.frozen:
        return "No run is of its preset's own model and schedule.\n"
    if {record["preset"] for record in of.records} <= comparison.SCHEDULES:
        return "Only other schedules of the baseline are run yet ([calibration](#calibration)).\n"
    if protocol_of(config_of(of.frozen[0])) != protocol_of(PRESETS[AFBO]()):
        how = "This is not the frozen protocol."
    elif is_calibrated(of):
        how = "Epochs were calibrated on AFBO+PR alone ([calibration](#calibration)), then frozen for all models."
    else:
        how = "All models share one protocol; that its epochs are the fewest to match is [not shown](#calibration)."
    machines = " and ".join(dict.fromkeys(map(machine_of, of.frozen)))
    return (
        f"{plural(len(of.frozen), 'run')} on {machines} ([provenance](#provenance)), all trained alike:"
        f" {_training(of.frozen)}. {how} Everything below is written from the run records by `oqc report`.\n\n{_NAMES}"
    )


def _asker(title: str) -> str:
    """A section's title, and whether its questions are ours."""
    return f"{title} (our question)" if all(claim.place == OURS for claim in SECTIONS[title]) else title


def _figures(of: Comparison) -> dict[str, str]:
    """Those that have something of ours to show."""
    drawn: dict[str, str] = {}
    found = {
        title: [f for claim in claims if claim.metric == "best" and isinstance(f := of.findings[claim], Finding)]
        for title, claims in SECTIONS.items()
    }
    if any(found.values()):
        drawn["claims"] = paper_figures.forest({_asker(title): some for title, some in found.items() if some})
    ours, paper = comparison.rank_points(of)
    if ours:
        drawn["rank-sweep"] = paper_figures.rank_sweep(ours, paper)
    ours, paper = comparison.pareto_points(of)
    if ours:
        drawn["pareto"] = paper_figures.pareto(ours, paper)
    values, theirs = comparison.mechanism_values(of)
    if any(values.get(series, {}).get("before") is not None for series in COMPLEMENTS):
        drawn["mechanism"] = paper_figures.mechanism(values, theirs, comparison.geometry_points(of))
    return drawn
