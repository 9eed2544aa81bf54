"""What the runs say of the claims, in sentences and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from oqc.experiments.claims import OURS, SECTIONS
from oqc.experiments.comparison import Comparison
from oqc.report.markdown import bound, form_of, markdown_table, p_value, plural, signed
from oqc.report.statistics import VERDICTS, Finding, Pending

_RULE = (
    "A claim is *reproduced* if the 95% interval of its seed-paired difference excludes 0 on the paper's side, and"
    " *contradicted* if it excludes 0 on the other; where the interval contains 0 it has the *same sign* or the *other"
    " sign*. The rule was fixed before the suites were run. The variance is pooled over all runs of the protocol."
)
_OWN = {"reproduced": "confirmed", "contradicted": "refuted"}
_UNITS = {"best": "points", "images_per_s": "images/s"}


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
    """How many claims hold, with the rule by which."""
    inside = [one.published_inside for one in of_paper(of) if isinstance(one, Finding)]
    sized = [value for value in inside if value is not None]
    text = f"## What holds\n\nThe paper's claims, {len(of_paper(of))} in all: {counts(of_paper(of))}."
    if sized:
        text += f" The published size lies in our interval for {sum(sized)} of {len(sized)}."
    text += f" Questions of ours beside them, on capacity and other hosts, {len(of_ours(of))}: {counts(of_ours(of))}."
    return f"{text}{after_correction(of)}\n\n{_RULE}\n"


def after_correction(of: Comparison) -> str:
    """How much of what single intervals say stands when all of them are looked at; nothing where none says anything."""
    decided = [one for one in of.findings.values() if isinstance(one, Finding) and one.verdict in VERDICTS[:2]]
    kept = sum(one.p_holm < 0.05 for one in decided)
    text = f" Of the {len(decided)} intervals that exclude 0, {kept} have p below 0.05 after Holm's correction too."
    return text if decided else ""


def negative(of: Comparison) -> str:
    """What does not hold, or points the other way; claims with one likely reason stand together."""
    text = ""
    for verdict, title, lead in (
        (
            "contradicted",
            "What does not hold",
            "The interval excludes 0 on the other side. Reasons are what seems likely; none was tested.",
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
            lines = [
                f"- {'; '.join(map(_clause, found))}. {reason[0].upper()}{reason[1:]}.\n"
                for reason, found in by_reason.items()
            ]
            text += f"## {title}\n\n{lead}\n\n{''.join(lines)}\n"
    return text


def _clause(found: Finding) -> str:
    claim, unit = found.claim, _UNITS.get(found.claim.metric)
    published = "" if claim.published is None else f": {signed(claim.published, claim.metric)}"
    return (
        f"**{claim.name}** ({claim.place}{published}): ours {interval(found)}{' ' + unit if unit else ''},"
        f" {plural(len(found.seeds), 'seed')}"
    )


def interval(found: Finding) -> str:
    """The difference with its interval, whose ends have as many digits as show their side of 0."""
    metric = found.claim.metric
    low, high = (bound(end, form_of(metric)) for end in (found.low, found.high))
    return f"{signed(found.difference, metric)} [{low}, {high}]"


def claim_tables(of: Comparison) -> str:
    """A table a section of claims."""
    assessed = sum(isinstance(one, Finding) for one in of.findings.values())
    text = (
        "## Claims\n\nDifference of the two sides of each claim, with its 95% interval. p is two-sided, with Holm's"
        f" correction over the {assessed} claims assessed; the verdict goes by the interval alone.\n\n"
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
