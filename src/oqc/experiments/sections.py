"""The tables of the results page: a section a suite, the mechanism, the calibration; the paper's values in brackets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oqc.analysis import METRICS, SEPARATION
from oqc.experiments import comparison, protocol
from oqc.experiments.claims import (
    AFBO,
    AFBO_NOPR,
    COMPLEMENTS,
    MLP_NOPR,
    STATIC,
    STATIC_CLOSED,
    UNPROJECTED,
)
from oqc.experiments.comparison import Comparison, published_gain, published_mean, published_speed, published_value
from oqc.experiments.presets import PRESETS
from oqc.experiments.published import value
from oqc.experiments.suites import SUITES
from oqc.experiments.wording import interval, listed
from oqc.report import Record
from oqc.report.markdown import beside, markdown_table, number, plural, signed, spread
from oqc.report.provenance import config_of
from oqc.report.statistics import VERDICTS, Finding, assess_all

NOT_RUN = "not run yet"
ALIKE = 0.05  # of the speed of two models that are called equally fast
WITHIN = 0.5  # points from the paper's baseline, for a schedule to count as matched


@dataclass(frozen=True)
class Suite:
    """A suite's section: where the paper has its numbers, what its rows gain over, what to know of it, and what is said
    of its runs below the table. A row's gain is over the last of `bases` that stands above it."""

    title: str
    name: str
    place: str | None = None
    bases: tuple[str, ...] = (AFBO,)
    text: str = ""
    below: Callable[[Comparison], str] | None = None


def _alike(of: Comparison) -> str:
    """No projection beside the one model of the suites that it shares its gate and the gate's start with."""
    found = of.gain(UNPROJECTED, STATIC)
    if found is None:
        return ""
    return (
        "Over OQC-static, whose gate is the same and starts alike, the branch without the projection gains"
        f" {interval(found)} ({plural(len(found.seeds), 'seed')}; R 56 and R 83). That is no claim: it has no side and"
        " no corrected p.\n"
    )


def _ranks(of: Comparison) -> str:
    """The ranks that AFBO+PR is told apart from, of those that no claim holds against it."""
    told = []
    for preset in SUITES["rank-sweep"]:
        claimed = any(set(claim.presets) == {preset, AFBO} for claim in of.findings)
        found = None if claimed or preset == AFBO else of.gain(preset)
        if found and (found.low > 0 or found.high < 0):
            verb = "beats" if found.low > 0 else "falls below"
            told.append(f"{title_of(preset)} {verb} AFBO+PR ({interval(found)}, {plural(len(found.seeds), 'seed')})")
    return f"By its own interval, though no claim says so, {listed(told)}.\n" if told else ""


SUITE_SECTIONS = (
    Suite("Main table", "table1", "table 1"),
    Suite(
        "Capacity",
        "capacity",
        text="Our own control: the complements add parameters, so AFBO+PR is widened to the same counts.",
    ),
    Suite(
        "Gate start",
        "gate-start",
        text="Our own control: by the paper's formula static's gate starts at 0.5, which its text calls the more"
        " conservative start, and the ablation without the projection has the same gate. Here both start at 0.12, as"
        " those of full and low-rank do.",
    ),
    Suite(
        "Alternative designs",
        "designs",
        "alternative designs",
        text="The paper holds these against table 1's baseline, though by its own note not all were trained as it was;"
        " ours are all of one protocol. No projection has static's gate, which starts at 0.5, and not the 0.12 of"
        " OQC-LR and shared: its differences from them are of the projection and of the start (gate start, above).",
        below=_alike,
    ),
    Suite("Decomposition", "decomposition", "table 4", (MLP_NOPR, AFBO_NOPR), "Gain is over the bare host."),
    Suite("Rank sweep", "rank-sweep", "rank sweep", below=_ranks),
    Suite(
        "Other hosts",
        "hosts",
        bases=("cifar100_afbo_grouped", "cifar100_swiglu"),
        text="Our own: hosts that the paper does not have. Gain is over the host alone.",
    ),
    Suite(
        "ViT-Tiny readout pilot",
        "vit-tiny",
        "limitations",
        ("cifar100_vit_tiny",),
        "The paper names neither data set nor training; only the difference of the two rows is to be read. To the"
        " paper a difference that small beside its ± is no improvement. Gain is over the row without PR.",
    ),
)


def title_of(preset: str) -> str:
    """What a preset's docstring calls it."""
    return (PRESETS[preset].__doc__ or preset).partition(":")[0]


def missing(preset: str, records: Sequence[Record]) -> str:
    """What stands in place of a preset's accuracy where no run of it finished."""
    return "diverged" if any("diverged" in one for one in records if one["preset"] == preset) else NOT_RUN


def measured(of: Comparison) -> str:
    """What the paper says of overlap and speed, which is no matter of seeds and has no verdict."""
    found = _overlap(of) + _faster(of)
    return f"Measured, without a verdict:\n\n{found}" if found else ""


def _overlap(of: Comparison) -> str:
    """What the projection does, over every run that has one."""
    found = [record["mechanism"] for record in of.frozen if record["mechanism"].get("after") is not None]
    if not found:
        return ""
    shares = [f"{one['before'] / one['chance']:.2f}" for one in found]
    span = " to ".join(dict.fromkeys((min(shares, key=float), max(shares, key=float))))
    return (
        f"- Over {plural(len(found), 'run')} with a projection the overlap of branch and host is"
        f" {span} times chance before it and at most"
        f" {max(one['after'] for one in found):.1e} after it.\n"
    )


def _faster(of: Comparison) -> str:
    """One complement's speed over another's, where the paper makes something of it."""
    told, alike = [], True
    for fast, slow in (("OQC-LR", "OQC full"), ("OQC-dynamic", "OQC-static")):
        speeds = [speed(COMPLEMENTS[name]) for speed in (of.speed, published_speed) for name in (fast, slow)]
        found = [speed for speed in speeds if speed]
        if len(found) == 4:
            ours, paper = found[0] / found[1], found[2] / found[3]
            alike = alike and abs(ours - 1) < ALIKE
            told.append(f"{fast} trains {ours:.3f} times as fast as {slow} (the paper: {paper:.3f})")
    fused = all(record["environment"].get("device") == "cuda" for record in of.frozen)
    why = "; likely since fused, each adds so little to a step that little is left between them"
    why = why if alike and fused else ""
    return f"- {', '.join(told)}{why}.\n" if told else ""


def suite_section(of: Comparison, suite: Suite) -> str:
    columns = (
        "Model", "Parameters", "Paper (%)", "Ours (%)", "Final (%)", "Seeds", "Paper's gain", "Our gain [95%]",
        "Images/s", "Speed",
    )  # fmt: skip
    body, base = [], suite.bases[0]
    for preset in SUITES[suite.name]:
        base = preset if preset in suite.bases else base
        row, paper = of.rows.get(preset, {}), published_value(suite.place, preset)
        gain = of.gain(preset, base) if preset != base else None
        size, theirs = (published_mean(suite.place, preset, name) for name in ("parameters_m", "images_per_s"))
        body.append(
            [
                title_of(preset),
                beside(number(row["parameters"] / 1e6) if row else "", number(size), " M"),
                spread(paper.mean, paper.std) if paper else "",
                spread(row["mean"], row["std"]) if row else missing(preset, of.diverged),
                number(row.get("final")),
                str(row["seeds"]) if row else "",
                signed(published_gain(suite.place, preset, base)) if preset != base else "",
                interval(gain) if gain else "",
                beside(_speed_told(of, preset), number(theirs, ",.0f")),
                beside(number(of.speed(preset)), number(published_speed(preset)) if suite.place == "table 1" else ""),
            ]
        )
    text = f"{suite.text}\n\n" if suite.text else ""
    below = suite.below(of) if suite.below else ""
    return f"### {suite.title}\n\n{text}{markdown_table(columns, body)}" + (f"\n{below}" if below else "")


def _speed_told(of: Comparison, preset: str) -> str:
    """Images/s, of a version of the code that did not train AFBO+PR with its commit."""
    found = of.images_per_s(preset)
    if found is not None:
        return number(found, ",.0f")
    latest = of.latest_speed(preset)
    return "" if latest is None else f"{latest[0]:,.0f} at {latest[1]}"


def mechanism_section(of: Comparison) -> str:
    """Geometry, overlap and gates of the main table's models, and of static from the other start."""
    ours, paper = comparison.mechanism_values(of)
    if not ours:
        return ""
    if STATIC_CLOSED in of.rows:
        own = of.rows[STATIC_CLOSED]
        name = f"OQC-static from 0.12 ({plural(own['seeds'], 'seed')})"
        ours, paper = {**ours, name: own | {"separation": own[SEPARATION]}}, {**paper, name: {}}
    columns: tuple[str, ...] = (
        "Model", "Effective rank", "Participation ratio", "Separation", "Overlap before", "Chance", "Overlap after",
        "Hidden cosine", "Gate mean", "Gate std", "Gate std over tokens",
    )  # fmt: skip
    forms = {
        "effective_rank": ".2f", "participation_ratio": ".2f", "separation": ".4f", "before": ".3f", "chance": ".3f",
        "after": ".1e", "hidden_cosine": ".3f", "gate_mean": ".3f", "gate_std": ".3f", "gate_token_std": ".3f",
    }  # fmt: skip
    if not any(row.get("gate_token_std") is not None for row in ours.values()):  # records from before it was measured
        columns, forms = columns[:-1], {name: form for name, form in forms.items() if name != "gate_token_std"}
    body = [
        [series, *(beside(number(row.get(n), form), number(paper[series].get(n), form)) for n, form in forms.items())]
        for series, row in ours.items()
    ]
    return (
        "## Mechanism\n\nMeans over the test set and the seeds, the paper's in brackets; the formulas are in"
        " docs/metrics.md. An overlap before projection means something only beside chance, the level of two random"
        " directions in its space. The hidden cosine is the overlap of what is added with the hidden map that it is"
        " added to; its chance level is that of OQC full, which is projected in the hidden space. The paper's gate of"
        " 0.190 is read as static's: the dynamic gate's mean is said to fall from there, and not which gate that"
        " was.\n\n"
        f"{_separation(of)}{markdown_table(columns, body)}"
    )


def _separation(of: Comparison) -> str:
    """All candidates for the paper's separation score, by the baseline alone."""
    row = of.rows.get(AFBO, {})
    candidates = {name: row[name] for name in METRICS if name.startswith("separation") and row.get(name) is not None}
    if not candidates:
        return ""
    shown = ", ".join(f"`{name}` {found:.4f}" for name, found in candidates.items())
    nearest = nearest_separation(candidates)
    beside = f"the nearest, `{nearest}`" if nearest == SEPARATION else f"`{SEPARATION}`, though `{nearest}` is nearer"
    published = value("table 3", AFBO, "separation").mean
    return (
        f"The paper has no formula for its separation, which is {published} for AFBO+PR; the candidates there are"
        f" {shown}. Set beside it is {beside}.{_by_candidates(of, tuple(candidates))}\n\n"
    )


def _by_candidates(of: Comparison, candidates: Sequence[str]) -> str:
    """Whether it depends on the candidate which claims on separation are reproduced and which contradicted."""
    decided = {}
    for name in candidates:
        found = assess_all(
            [replace(claim, metric=name) for claim in of.findings if claim.metric == SEPARATION], of.frozen
        )
        verdicts = [one.verdict if isinstance(one, Finding) else None for one in found]
        decided[name] = [verdict if verdict in VERDICTS[:2] else None for verdict in verdicts]
    if not any(decided.get(SEPARATION, ())):
        return ""
    other = [f"`{name}`" for name in candidates if decided[name] != decided[SEPARATION]]
    told = f"changes with {', '.join(other)}" if other else "is the same whichever of them is taken"
    return f" Which claims on separation are reproduced and which contradicted {told}."


def nearest_separation(candidates: dict[str, float]) -> str:
    published = value("table 3", AFBO, "separation").mean
    return min(candidates, key=lambda name: abs(candidates[name] - published))


def calibration_section(of: Comparison) -> str:
    target, tried = value("table 1", AFBO).mean, _schedules(of)
    rule = (
        f"AFBO+PR alone, to the shortest schedule with a mean within {WITHIN} of the published {target:.2f}. That match"
        " is the only use of test accuracy in any choice."
    )
    if not tried:
        return f"## Calibration\n\n{rule}\n\nOurs: {NOT_RUN}.\n"
    shortest = _shortest_match(of)
    found = (
        "None of these matches." if shortest is None else f"The shortest of these that matches has {shortest} epochs."
    )
    body = []
    for epochs, preset in tried.items():
        row, frozen = of.rows[preset], ", frozen" if epochs == protocol.CIFAR100_TRAIN.epochs else ""
        cells = spread(row["mean"], row["std"]), str(row["seeds"]), signed(row["mean"] - target)
        body.append([f"{epochs}{frozen}", *cells])
    shown = markdown_table(("Epochs", "Ours (%)", "Seeds", "From the paper's"), body)
    return f"## Calibration\n\n{rule} {found}\n\n{shown}"


def is_calibrated(of: Comparison) -> bool:
    """Whether the runs bear out the frozen schedule: it is the shortest that matches, and a shorter one was tried."""
    return _shortest_match(of) == protocol.CIFAR100_TRAIN.epochs > min(_schedules(of))


def _schedules(of: Comparison) -> dict[int, str]:
    """The baseline's presets that were run, by their epochs."""
    found = {config_of(r).train.epochs: r["preset"] for r in of.records if r["preset"] in SUITES["calibration"]}
    return dict(sorted(found.items()))


def _shortest_match(of: Comparison) -> int | None:
    target = value("table 1", AFBO).mean
    matched = (n for n, preset in _schedules(of).items() if abs(of.rows[preset]["mean"] - target) <= WITHIN)
    return next(matched, None)
