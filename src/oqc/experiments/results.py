"""The page of a results file: the paper's CIFAR-100 tables with ours beside them, claims, calibration, figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oqc.analysis import SEPARATION
from oqc.experiments import comparison, findings
from oqc.experiments.claims import AFBO, COMPLEMENTS, SECTIONS
from oqc.experiments.comparison import Comparison, published_speed, published_value
from oqc.experiments.presets import PRESETS
from oqc.experiments.suites import SUITES
from oqc.report import Record, paper_figures, rows, table
from oqc.report.figures import COLORS, accuracy_over_epochs
from oqc.report.files import write_whole
from oqc.report.markdown import markdown_table, number, signed, spread
from oqc.report.provenance import config_of, environment_line, protocol_of, training_line
from oqc.report.statistics import Finding

FIGURES = "figures"  # the folder beside the page
NAMES = ("claims", "rank-sweep", "pareto", "mechanism", "accuracy")
NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Page:
    """Markdown, and the SVG figures it shows by their path beside it."""

    text: str
    figures: dict[str, str]

    def write(self, folder: Path) -> list[Path]:
        """Writes results.md and its figures, and removes figures of ours that it no longer has."""
        for name in NAMES:
            if f"{FIGURES}/{name}.svg" not in self.figures:
                (folder / FIGURES / f"{name}.svg").unlink(missing_ok=True)
        for name, text in {**self.figures, "results.md": self.text}.items():
            write_whole(folder / name, text)
        return [folder / name for name in ("results.md", *self.figures)]


@dataclass(frozen=True)
class Suite:
    """A suite's section: where the paper has its numbers, and what to know of it."""

    title: str
    name: str
    place: str | None = None
    text: str = ""


SUITE_SECTIONS = (
    Suite("Main table", "table1", "table 1"),
    Suite(
        "Capacity",
        "capacity",
        None,
        "Our own control: the complements add parameters, so AFBO+PR is widened to the same counts.",
    ),
    Suite(
        "Alternative designs",
        "designs",
        "alternative designs",
        "The paper holds these against table 1's baseline, though by its own note not all were trained as that was;"
        " ours are all of one protocol.",
    ),
    Suite("Decomposition", "decomposition", "table 4"),
    Suite("Rank sweep", "rank-sweep", "rank sweep"),
    Suite("Other hosts", "hosts", None, "Our own: hosts that the paper does not have."),
    Suite(
        "ViT-Tiny readout pilot",
        "vit-tiny",
        "limitations",
        "The paper names neither data set nor training; only the difference of the two rows is to be read.",
    ),
)


def results_page(records: Sequence[Record]) -> Page:
    """Claims and the paper's tables where the records are of CIFAR-100 presets, else a plain table."""
    if records and not any(_is_of_suites(record) for record in records):
        return _plain_page(records)
    of = comparison.compare([record for record in records if _is_of_suites(record)])
    figures = _figures(of)
    show = {name: f"\n![{name.replace('-', ' ')}]({FIGURES}/{name}.svg)\n" for name in figures}
    parts = [
        "# The paper's CIFAR-100 results, rerun\n",
        "<!-- Written by `oqc report`; edits are lost. -->\n",
        _how(of),
        findings.summary(of) + show.get("claims", ""),
        findings.negative(of),
        "## Tables\n",
        "Best test accuracy over training in percent, mean ± standard deviation over the seeds. Speed is training"
        " throughput as a share of AFBO+PR's, so that two machines can be compared.\n",
        *(_suite(of, suite) for suite in SUITE_SECTIONS[:-2]),
        *(show[name] for name in ("rank-sweep", "pareto") if name in show),
        *(_suite(of, suite) for suite in SUITE_SECTIONS[-2:]),
        _mechanism(of) + show.get("mechanism", ""),
        findings.claim_tables(of),
        _calibration(of),
    ]
    others = [record for record in records if not _is_of_suites(record)]
    if others:
        parts.append(f"## Other runs\n\n{markdown_table(*table(rows(others)))}")
    text = "\n".join(part.strip("\n") + "\n" for part in parts if part)
    return Page(text, {f"{FIGURES}/{name}.svg": svg for name, svg in figures.items()})


def _is_of_suites(record: Record) -> bool:
    return record["preset"] in PRESETS and record["config"].get("data", {}).get("name") == comparison.DATA


def _plain_page(records: Sequence[Record]) -> Page:
    """Any other file: one table, and the accuracy over epochs where the lines can be told apart."""
    name = records[0]["config"].get("data", {}).get("name", "runs")
    text = f"# Results: {name}\n\n{_trained(records)}\n{markdown_table(*table(rows(records)))}"
    if len({record["preset"] for record in records}) > len(COLORS):
        return Page(text, {})
    figure = f"{FIGURES}/accuracy.svg"
    return Page(f"{text}\n![accuracy over epochs]({figure})\n", {figure: accuracy_over_epochs(records)})


def _trained(records: Sequence[Record]) -> str:
    ways = dict.fromkeys(training_line(record) for record in records)
    return f"{len(records)} runs on {environment_line(records)}. Training: {'; '.join(ways)}.\n"


def _how(of: Comparison) -> str:
    if not of.records:
        return "Nothing is run yet: `oqc reproduce all` fills this page.\n"
    if protocol_of(config_of(of.frozen[0])) == protocol_of(PRESETS[AFBO]()):
        how = "Epochs were calibrated on AFBO+PR alone ([calibration](#calibration)), then frozen for all models."
    else:
        how = "This is not the protocol that was calibrated to the paper's baseline."
    return f"{_trained(of.frozen)}\n{how} Everything below is written from the run records by `oqc report`.\n"


def title_of(preset: str) -> str:
    """What a preset's docstring calls it."""
    return (PRESETS[preset].__doc__ or preset).partition(":")[0]


def _suite(of: Comparison, suite: Suite) -> str:
    columns = (
        "Model",
        "Parameters",
        "Paper's parameters",
        "Paper (%)",
        "Ours (%)",
        "Seeds",
        "Images/s",
        "Speed",
        "Paper's speed",
    )
    body = []
    for preset in SUITES[suite.name]:
        paper, size = published_value(suite.place, preset), published_value(suite.place, preset, "parameters_m")
        row = of.rows.get(preset)
        body.append(
            [
                title_of(preset),
                f"{row['parameters'] / 1e6:.2f} M" if row else "",
                f"{size.mean:.2f} M" if size else "",
                spread(paper.mean, paper.std) if paper else "",
                spread(row["mean"], row["std"]) if row else NOT_RUN,
                str(row["seeds"]) if row else "",
                number(row["images_per_s"], ",.0f") if row else "",
                number(of.speed(preset)),
                number(published_speed(preset)) if suite.place == "table 1" else "",
            ]
        )
    text = f"{suite.text}\n\n" if suite.text else ""
    return f"### {suite.title}\n\n{text}{markdown_table(columns, body)}"


def _mechanism(of: Comparison) -> str:
    """Geometry, overlap and gates of the main table's models, the paper's values in brackets."""
    ours, paper = comparison.mechanism_values(of)
    if not ours:
        return ""
    columns = (
        "Model", "Effective rank", "Participation ratio", "Separation", "Overlap before", "Chance", "Overlap after",
        "Hidden cosine", "Gate mean", "Gate std",
    )  # fmt: skip
    forms = {
        "effective_rank": ".2f", "participation_ratio": ".2f", "separation": ".4f", "before": ".3f", "chance": ".3f",
        "after": ".1e", "hidden_cosine": ".3f", "gate_mean": ".3f", "gate_std": ".3f",
    }  # fmt: skip
    body = []
    for series, row in ours.items():
        cells = [series]
        for name, form in forms.items():
            theirs = paper[series].get(name)
            cells.append(number(row.get(name), form) + (f" ({theirs:{form}})" if theirs is not None else ""))
        body.append(cells)
    return (
        "## Mechanism\n\nMeans over the test set and the seeds, with the paper's value in brackets. The formulas are in"
        f" docs/metrics.md; separation is `{SEPARATION}`. An overlap before projection means something only beside"
        f" chance, the level of two random directions.\n\n{markdown_table(columns, body)}"
    )


def _calibration(of: Comparison) -> str:
    target = published_value("table 1", AFBO)
    assert target is not None
    body = []
    for preset in SUITES["calibration"]:
        found = [record for record in of.records if record["preset"] == preset]
        if found:
            row, run = of.rows[preset], config_of(found[0])
            epochs, frozen = run.train.epochs, protocol_of(run) == protocol_of(PRESETS[AFBO]())
            cells = [spread(row["mean"], row["std"]), str(row["seeds"]), signed(row["mean"] - target.mean)]
            body.append((epochs, [f"{epochs}{', frozen' if frozen else ''}", *cells]))
    rule = (
        f"AFBO+PR alone, to the shortest schedule with a mean within 0.5 of the published {target.mean:.2f}. That match"
        " is the only use of test accuracy in any choice."
    )
    columns = ("Epochs", "Ours (%)", "Seeds", "From the paper's")
    shown = markdown_table(columns, [cells for _, cells in sorted(body)]) if body else f"Ours: {NOT_RUN}.\n"
    return f"## Calibration\n\n{rule}\n\n{shown}"


def _figures(of: Comparison) -> dict[str, str]:
    """Those that have something of ours to show."""
    drawn: dict[str, str] = {}
    found = {
        title: [f for claim in claims if claim.metric == "best" and isinstance(f := of.findings[claim], Finding)]
        for title, claims in SECTIONS.items()
    }
    if any(found.values()):
        drawn["claims"] = paper_figures.forest({title: some for title, some in found.items() if some})
    ours, paper = comparison.rank_points(of)
    if ours:
        drawn["rank-sweep"] = paper_figures.rank_sweep(ours, paper)
    ours, paper = comparison.pareto_points(of)
    if ours:
        drawn["pareto"] = paper_figures.pareto(ours, paper)
    values, theirs = comparison.mechanism_values(of)
    if any(values.get(series, {}).get("before") is not None for series in COMPLEMENTS):
        drawn["mechanism"] = paper_figures.mechanism(values, theirs)
    return drawn
