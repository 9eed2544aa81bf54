"""What the runs say of the claims, in sentences and tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from oqc.analysis import SEPARATION
from oqc.experiments.claims import AFBO, COMPLEMENTS, GAINS, GATE_USE, OURS, SECTIONS, STATEMENTS, STATIC, TESTED
from oqc.experiments.comparison import Comparison
from oqc.experiments.published import value
from oqc.report.markdown import bound, form_of, markdown_table, p_value, plural, signed
from oqc.report.statistics import SETTLED, VERDICTS, Cells, Finding, Pending, assess_all, cells, pooled_noise

_RULE = (
    "A claim is *reproduced* if the 95% interval of its seed-paired difference excludes 0 on the paper's side, and"
    " *contradicted* if it excludes 0 on the other; where the interval contains 0 it has the *same sign* or the *other"
    " sign*. The rule was fixed before the suites were run. The variance is pooled over all runs of the protocol. Two"
    " claims on speed and the sizes of those on separation were taken out after this library's first 69 runs, and six"
    " on the rank sweep's other ranks added after 75 (docs/deviations.md)."
)
_METRICS = {
    "best": "Accuracy",
    "effective_rank": "Effective rank",
    "participation_ratio": "Participation ratio",
    SEPARATION: "Separation",
    "gate_mean": "Gate mean",
    "gate_std": "Gate std",
}
_OF_FEATURES = ("effective_rank", "participation_ratio", SEPARATION)
_OWN = {"reproduced": "confirmed", "contradicted": "refuted"}


def verdict_of(one: Finding | Pending) -> str:
    """The verdict in words; of what the paper does not claim nothing can be reproduced."""
    if isinstance(one, Pending):
        return one.why
    return _OWN.get(one.verdict, one.verdict) if one.claim.place == OURS else one.verdict


def counts(outcomes: Sequence[Finding | Pending]) -> str:
    """`3 reproduced, 1 contradicted, 2 not run yet`: only what there is."""
    found = Counter(map(verdict_of, outcomes))
    order = dict.fromkeys([VERDICTS[0], "confirmed", VERDICTS[1], "refuted", *VERDICTS[2:], *found])
    return ", ".join(f"{found[name]} {name}" for name in order if found[name])


def of_paper(of: Comparison) -> list[Finding | Pending]:
    return [outcome for claim, outcome in of.findings.items() if claim.place != OURS]


def of_ours(of: Comparison) -> list[Finding | Pending]:
    return [outcome for claim, outcome in of.findings.items() if claim.place == OURS]


def summary(of: Comparison) -> str:
    """How many claims hold, of which statements of the paper, and the rule by which."""
    sized = [one for one in of_paper(of) if isinstance(one, Finding) and one.published_inside is not None]
    text = f"## What holds\n\nThe paper's claims, {len(of_paper(of))} in all: {counts(of_paper(of))}."
    if sized:
        inside = [one for one in sized if one.published_inside]
        text += f" The published size lies in our interval for {len(inside)} of {len(sized)}"
        text += f"; {_open(inside)} of these intervals contain 0 too." if inside else "."
    own = of_ours(of)
    text += f" Questions of ours beside them, on capacity, the gate's start and other hosts, {len(own)}: {counts(own)}."
    return f"{text}{after_correction(of)}\n\n{_statements(of)}{_RULE}\n"


def _open(found: Sequence[Finding]) -> int:
    """How many of the intervals contain 0."""
    return sum(one.verdict in VERDICTS[2:] for one in found)


def _statements(of: Comparison) -> str:
    """What the paper says, a row a sentence: how many of the claims behind it got which verdict."""
    if not any(isinstance(one, Finding) for one in of.findings.values()):
        return ""
    columns = ("What the paper says, and what we ask", "Claims", "Reproduced or confirmed", "Same sign", "Other sign",
               "Contradicted or refuted", "Not assessed")  # fmt: skip
    body = []
    for statement, claims in STATEMENTS.items():
        found = Counter(_verdict(of.findings[claim]) for claim in claims)
        verdicts = ("reproduced", "same sign", "other sign", "contradicted", None)
        body.append([statement, str(len(claims)), *(str(found[name] or "") for name in verdicts)])
    return f"{markdown_table(columns, body)}\n[Claims](#claims) has each with its numbers.\n\n"


def _verdict(one: Finding | Pending) -> str | None:
    return one.verdict if isinstance(one, Finding) else None


def after_correction(of: Comparison) -> str:
    """How much of what single intervals say stands when all of them are looked at; nothing where none says anything."""
    decided = _decided(of)
    kept = sum(one.p_holm < SETTLED for one in decided)
    text = (
        f" Of the {len(decided)} intervals that exclude 0, {kept} have p below {SETTLED} after Holm's correction too."
    )
    return text if decided else ""


def gains(of: Comparison) -> str:
    """Which complements beat the baseline, by their own interval and after the correction; nothing before the runs."""
    found = [one for claim in GAINS if isinstance(one := of.findings[claim], Finding)]
    if not found:
        return ""
    above = [one for one in found if one.verdict == VERDICTS[0]]
    if not above:
        return "By the gain's own interval no complement beats AFBO+PR."
    names = ", ".join(one.claim.name.removesuffix(" beats AFBO+PR") for one in above)
    kept = sum(one.p_holm < SETTLED for one in above)
    return (
        f"AFBO+PR is beaten, by the gain's own interval, by {names}; gains that stand after Holm's correction over all"
        f" claims: {kept} of {len(above)}."
    )


def contradicted(of: Comparison) -> str:
    """The paper's claims on accuracy that are contradicted, by name; nothing where none is."""
    found = [one for one in _decided(of) if one.verdict == "contradicted" and one.claim.place != OURS]
    found = [one for one in found if one.claim.metric == "best"]
    if not found:
        return ""
    names = ", ".join(f'"{one.claim.name}"' for one in found)
    kept = sum(one.p_holm < SETTLED for one in found)
    return f" Contradicted on accuracy: {names}; after Holm's correction too: {kept} of {len(found)}."


def _decided(of: Comparison) -> list[Finding]:
    return [one for one in of.findings.values() if isinstance(one, Finding) and one.verdict in VERDICTS[:2]]


def positive(of: Comparison) -> str:
    """The claims that hold, those first that the correction leaves, and how many turn on one model."""
    found = [one for one in _decided(of) if one.verdict == VERDICTS[0]]
    text = ""
    for kept, title in ((True, "after Holm's correction too"), (False, "by their own interval alone")):
        lines = [f"- {_clause(one)}\n" for one in found if (one.p_holm < SETTLED) == kept]
        text += f"Reproduced or confirmed, {title}:\n\n{''.join(lines)}\n" if lines else ""
    notes = [note for note in (one_model(of), _gates(of)) if note]
    return text + "\n\n".join(notes) + "\n" * bool(notes)


def one_model(of: Comparison) -> str:
    """How much of the above turns on OQC-static, whose start is our reading of two statements that disagree."""
    decided = [one for one in _decided(of) if one.claim.place != OURS]
    its = Counter(one.verdict for one in decided if STATIC in one.claim.presets)
    if not its:
        return ""
    shares = " and ".join(f"{its[name]} of the {_count(decided, name)} {name}" for name in VERDICTS[:2] if its[name])
    return (
        f"{shares} are about OQC-static, on one side or the other. Its gate starts at 0.5 here, as the paper's formula"
        " has it and its text does not (docs/deviations.md)."
    )


def _gates(of: Comparison) -> str:
    """What the claims on gates rest on, where they hold."""
    found = [one for claim in GATE_USE if isinstance(one := of.findings[claim], Finding)]
    if not any(one.verdict == VERDICTS[0] for one in found):
        return ""
    paper = value("mechanism text", STATIC, "gate_mean").mean
    means = {name: of.rows.get(preset, {}).get("gate_mean") for name, preset in COMPLEMENTS.items()}
    static = means["OQC-static"]
    nearer = [
        f"{mean:.3f} ({name})"
        for name in ("OQC full", "OQC-LR")
        if static is not None and (mean := means[name]) is not None and abs(mean - paper) < abs(static - paper)
    ]
    ends = " and ".join(nearer)
    others = f" Scalar gates that start at 0.12 end nearer to it, at {ends}: it may be one of theirs." if ends else ""
    spread = of.rows.get(COMPLEMENTS["OQC-dynamic"], {}).get("gate_token_std")
    measured = "these records lack it" if spread is None else f"dynamic's is {spread:.3f}"
    return (
        "What is said of gates rests on our reading of the paper's 0.190 as static's, and on our starts: static's at"
        f" 0.5, dynamic's at 0.12.{others} A spread over tokens and blocks does not yet show that a gate depends on its"
        f" input, since a scalar gate has one over blocks; the one over tokens would (docs/metrics.md): {measured}."
    )


def _count(found: Sequence[Finding], verdict: str) -> int:
    return sum(one.verdict == verdict for one in found)


def negative(of: Comparison) -> str:
    """What does not hold, or points the other way; claims with one likely reason stand together."""
    text = ""
    for verdict, title, lead in (
        (
            "contradicted",
            "What does not hold",
            "The interval excludes 0 on the other side. Reasons are what seems likely.",
        ),
        (
            "other sign",
            "What points the other way",
            "The interval contains 0: not settled, but no support. Reasons are guesses.",
        ),
    ):
        by_reason: dict[str, list[Finding]] = {}
        for one in of.findings.values():
            if isinstance(one, Finding) and one.verdict == verdict:
                by_reason.setdefault(one.claim.reason, []).append(one)
        if by_reason:
            text += f"## {title}\n\n{lead}\n\n"
            text += _with_reasons(of, by_reason)
    return text


def smaller(of: Comparison) -> str:
    """The claims whose side is the paper's and whose size is not: the published one is beyond the interval."""
    by_reason: dict[str, list[Finding]] = {}
    for one in of_paper(of):
        if not isinstance(one, Finding) or one.claim.published is None or one.published_inside:
            continue
        if 0 < one.difference * one.claim.side < abs(one.claim.published):
            by_reason.setdefault(one.claim.reason, []).append(one)
    if not by_reason:
        return ""
    lead = "On the paper's side, but the interval excludes the published size. Reasons are guesses."
    return f"## What is smaller than published\n\n{lead}\n\n{_with_reasons(of, by_reason)}"


def _with_reasons(of: Comparison, by_reason: dict[str, list[Finding]]) -> str:
    text = ""
    for reason, found in by_reason.items():
        test = of.findings[TESTED[reason]] if reason in TESTED else None
        if isinstance(test, Finding):
            reason += f". Tested by our question whether {test.claim.name}: {verdict_of(test)}, {interval(test)}"
        lines = [f"- {_clause(one)}\n" for one in found]
        text += f"{reason[0].upper()}{reason[1:]}.\n\n{''.join(lines)}\n"
    return text


def _clause(found: Finding) -> str:
    claim, unit = found.claim, " points" if found.claim.metric == "best" else ""
    published = "" if claim.published is None else f": {signed(claim.published, claim.metric)}"
    return (
        f"**{claim.name}** ({claim.place}{published}): ours {interval(found)}{unit},"
        f" {plural(len(found.seeds), 'seed')}, p (Holm) {p_value(found.p_holm)}"
    )


def interval(found: Finding) -> str:
    """The difference with its interval, whose ends have as many digits as show their side of 0."""
    metric = found.claim.metric
    low, high = (bound(end, form_of(metric)) for end in (found.low, found.high))
    return f"{signed(found.difference, metric)} [{low}, {high}]"


def _noise(of: Comparison) -> str:
    """The standard deviation that intervals rest on, and how far those of single models are from it."""
    body = []
    for metric, name in _METRICS.items():
        found = cells(of.frozen, metric)
        own = [statistics.stdev(some) for some in _by_preset(found) if len(some) > 2]
        try:
            noise = pooled_noise(found)
        except ValueError:  # too few runs
            continue
        form = form_of(metric)
        spread = f"{min(own):{form}} to {max(own):{form}}" if own else ""
        body.append([name, f"{noise.variance**0.5:{form}}", str(noise.freedom), spread])
    if not body:
        return ""
    return (
        "Intervals rest on one standard deviation of a run, pooled over all models. Where single models' own are far"
        " apart, as they are for what is measured of features and gates, that is an approximation.\n\n"
        + markdown_table(("Metric", "Pooled", "Degrees of freedom", "Of single models, with the seeds' effect"), body)
        + _by_main_table(of)
        + "\n"
    )


def _by_main_table(of: Comparison) -> str:
    """What would change if the claims on features rested on the runs of the models that they are about alone."""
    main = [record for record in of.frozen if record["preset"] in (AFBO, *COMPLEMENTS.values())]
    claims = [claim for claim in of.findings if claim.metric in _OF_FEATURES]
    pairs = [(of.findings[one.claim], one) for one in assess_all(claims, main)]
    known = [(a, b) for a, b in pairs if isinstance(a, Finding) and isinstance(b, Finding)]
    if not known:
        return ""
    changed = [f'"{b.claim.name}" would be {verdict_of(b)} ({interval(b)})' for a, b in known if a.verdict != b.verdict]
    told = "; ".join(changed) if changed else "no verdict would change"
    return f"\nBy the spread of the main table's models alone, of {len(known)} claims on features: {told}.\n"


def _by_preset(of: Cells) -> list[list[float]]:
    found: dict[str, list[float]] = {}
    for (preset, _), one in of.items():
        found.setdefault(preset, []).append(one)
    return list(found.values())


def claim_tables(of: Comparison) -> str:
    """A table a section of claims."""
    assessed = sum(isinstance(one, Finding) for one in of.findings.values())
    text = (
        "## Claims\n\nDifference of the two sides of each claim, over the seeds that all its models have, with its"
        f" 95% interval. p is two-sided, with Holm's correction over the {assessed} claims assessed; a verdict goes by"
        f" the interval alone. The published size is taken as exact, though it has a spread of its own.\n\n{_noise(of)}"
    )
    columns = ("Claim", "Place", "Published", "Ours [95%]", "Seeds", "p (Holm)", "Verdict", "Published size inside")
    for title, claims in SECTIONS.items():
        body = []
        for claim in claims:
            one, published = of.findings[claim], signed(claim.published, claim.metric)
            if isinstance(one, Pending):
                body.append([claim.name, claim.place, published, "", "", "", verdict_of(one), ""])
                continue
            inside = {None: "", True: "yes", False: "no"}[one.published_inside]
            shown = [interval(one), str(len(one.seeds)), p_value(one.p_holm), verdict_of(one), inside]
            body.append([claim.name, claim.place, published, *shown])
        text += f"### {title}: claims\n\n{markdown_table(columns, body, words=('Place', 'Verdict'))}\n"
    return text
