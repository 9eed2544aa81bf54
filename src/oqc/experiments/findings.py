"""What the runs say of the claims, in sentences and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from oqc.experiments import caveats
from oqc.experiments.claims import (
    ALIKE,
    BY_NUMBERS,
    CAPACITY,
    COMPLEMENTS,
    GAINS,
    GATE_START,
    ON_MLP,
    OURS,
    PROJECTION,
    SECTIONS,
    STATEMENTS,
    TESTED,
)
from oqc.experiments.comparison import Comparison
from oqc.experiments.wording import certainty, clause, decided, interval, listed, verdict_of
from oqc.report.markdown import markdown_table, p_value, signed
from oqc.report.statistics import SETTLED, VERDICTS, Claim, Finding, Pending

_RULE = (
    "A claim is *reproduced* if the 95% interval of its seed-paired difference excludes 0 on the paper's side, and"
    " *contradicted* if it excludes 0 on the other; where the interval contains 0 it has the *same sign* or the *other"
    " sign*. The rule was fixed before the suites were run. The variance is pooled over all runs of the protocol, and p"
    " (Holm) is corrected for looking at all claims at once. Claims are not independent: those of ranks far apart are"
    f" sums of the steps between. Of the paper's, {len(BY_NUMBERS)} are made by its numbers alone, in no words:"
    f" {listed([repr(one.name) for one in BY_NUMBERS])}."
    " Two claims were taken out after runs were seen (docs/deviations.md)."
)
LATE = "†"  # beside the name of a claim that was written down when its runs were seen already


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
    text += late(of, f", marked {LATE},")
    if sized:
        inside = [one for one in sized if one.published_inside]
        text += f" The published size lies in our interval for {len(inside)} of {len(sized)}"
        unsettled = sum(one.verdict in VERDICTS[2:] for one in inside)
        text += f"; {unsettled} of these intervals contain 0 too." if inside else "."
    own = of_ours(of)
    text += f" Questions of ours beside them, on capacity, the gate's start and other hosts, {len(own)}: {counts(own)}"
    core = "".join(f"- {line}\n" for line in central(of))
    core = f"Of what matters most, in points of accuracy:\n\n{core}\n" if core else ""
    return f"{text}{_on_one_seed(own)}.{after_correction(of)}\n\n{core}{_statements(of)}{_RULE}\n"


def _on_one_seed(found: Sequence[Finding | Pending]) -> str:
    alone = [one for one in found if isinstance(one, Finding) and one.verdict in VERDICTS[:2] and len(one.seeds) == 1]
    return f"; {len(alone)} of those decided {'rests' if len(alone) == 1 else 'rest'} on one seed" if alone else ""


def late(of: Comparison, mark: str = "") -> str:
    """How the paper's claims stand without those that were written down when their runs were seen already."""
    found = [one for one in of_paper(of) if isinstance(one, Finding)]
    early = [one for one in of_paper(of) if not one.claim.late]
    if not any(one.claim.late for one in found):
        return ""
    return (
        f" {len(of_paper(of)) - len(early)} of them{mark} were written down when their runs were seen already; without"
        f" these: {counts(early)}."
    )


def central(of: Comparison) -> list[str]:
    """What the paper's argument stands on, and what its numbers leave open, a line each."""

    def told(*asked: tuple[Claim, str]) -> str:
        """`whom difference; whom difference`, of the claims that are assessed."""
        return "; ".join(
            f"{whom} {_short(of, claim)}" for claim, whom in asked if isinstance(of.findings[claim], Finding)
        )

    over_afbo = dict(zip(COMPLEMENTS, GAINS, strict=True))
    projection = told(
        (PROJECTION[0], "against AFBO+PR"),
        (PROJECTION[1], "against OQC-LR, whose gate starts at 0.12 and not at 0.5,"),
        (ALIKE[0], "against OQC-LR with both gates from 0.12"),
    )
    static = told(
        (over_afbo["OQC-static"], "with its gate from 0.5, as the paper's formula has it,"),
        (GATE_START[1], "from 0.12, where the others start,"),
    )
    wide = told(*zip(CAPACITY, COMPLEMENTS, strict=True))
    mlp = told((ON_MLP[0], "ours"))
    lines = {
        "Without the projection": projection,
        "OQC-LR on a plain MLP": f"{mlp}; the paper has {signed(ON_MLP[0].published)}" if mlp else "",
        "OQC-static over AFBO+PR": static,
        "Over AFBO+PR widened to the same size": wide,
    }
    return [f"**{title}**: {text}." for title, text in lines.items() if text]


def _short(of: Comparison, claim: Claim) -> str:
    found = of.findings[claim]
    assert isinstance(found, Finding)
    return interval(found) + (" (1 seed)" if len(found.seeds) == 1 else "")


def _statements(of: Comparison) -> str:
    """What the paper says, a row a sentence: how many of the claims behind it got which verdict."""
    if not any(isinstance(one, Finding) for one in of.findings.values()):
        return ""
    columns = ("What the paper says, and what we ask", "Claims", "Reproduced or confirmed", "Same sign", "Other sign",
               "Contradicted or refuted", "Not assessed")  # fmt: skip
    body = []
    for statement, claims in STATEMENTS.items():
        outcomes = [of.findings[claim] for claim in claims]
        found = Counter(one.verdict if isinstance(one, Finding) else None for one in outcomes)
        verdicts = ("reproduced", "same sign", "other sign", "contradicted", None)
        body.append([statement, str(len(claims)), *(str(found[name] or "") for name in verdicts)])
    return f"{markdown_table(columns, body)}\n[Claims](#claims) has each with its numbers.\n\n"


def after_correction(of: Comparison) -> str:
    """How much of what single intervals say stands when all of them are looked at; nothing where none says anything."""
    found = decided(of)
    kept = sum(one.p_holm < SETTLED for one in found)
    told = (
        f" Of the paper's claims and our questions together, {len(found)} intervals exclude 0, {kept} of them with p"
        f" below {SETTLED} after Holm's correction too."
    )
    return told if found else ""


def gains(of: Comparison) -> str:
    """Which complements beat the baseline, by their own interval and after the correction; nothing before the runs."""
    found = [one for claim in GAINS if isinstance(one := of.findings[claim], Finding)]
    if not found:
        return ""
    above = [one for one in found if one.verdict == VERDICTS[0]]
    if not above:
        return "**Gains**: by its own interval no complement beats AFBO+PR."
    names = listed([one.claim.name.removesuffix(" beats AFBO+PR") for one in above])
    kept = sum(one.p_holm < SETTLED for one in above)
    rest = {0: "none does", 1: "one does", len(above): "all do"}.get(kept, f"{kept} do")
    if len(above) == 1:
        rest = "it does" if kept else "it does not"
    return (
        f"**Gains**: {names} {'beat' if len(above) > 1 else 'beats'} AFBO+PR by the gain's own interval; after Holm's"
        f" correction over all claims {rest}."
    )


def contradicted(of: Comparison) -> str:
    """The paper's claims on accuracy that are contradicted, by name; nothing where none is."""
    found = [one for one in decided(of) if one.verdict == "contradicted" and one.claim.place != OURS]
    found = [one for one in found if one.claim.metric == "best"]
    if not found:
        return ""
    names = ", ".join(f'"{one.claim.name}"' for one in found)
    kept = sum(one.p_holm < SETTLED for one in found)
    return f"**Contradicted on accuracy**: {names}; after Holm's correction too: {kept} of {len(found)}."


def positive(of: Comparison) -> str:
    """The claims that hold, those first that the correction leaves, and what the verdicts rest on."""
    found = [one for one in decided(of) if one.verdict == VERDICTS[0]]
    text = ""
    for kept, title in ((True, "after Holm's correction too"), (False, "by their own interval alone")):
        lines = [f"- {clause(one)}\n" for one in found if (one.p_holm < SETTLED) == kept]
        text += f"Reproduced or confirmed, {title}:\n\n{''.join(lines)}\n" if lines else ""
    notes = (caveats.one_model(of), caveats.other_start(of), caveats.our_score(of), caveats.gates(of))
    return text + "\n".join(f"{note.rstrip()}\n" for note in notes if note)


def negative(of: Comparison) -> str:
    """What does not hold, or points the other way; claims with one likely reason stand together."""
    text, found = "", [one for one in of.findings.values() if isinstance(one, Finding)]
    against = [one for one in found if one.verdict == "contradicted"]
    if against:
        lead = "The interval excludes 0 on the other side. Reasons are what seems likely."
        text += f"## What does not hold\n\n{lead}\n\n{_with_reasons(of, against)}"
    other = [one for one in found if one.verdict == "other sign" and one.difference]
    shown = [one for one in other if not one.published_inside]
    if shown:
        lead = "The interval contains 0: not settled, but no support. Reasons are guesses."
        left = len(other) - len(shown)
        even = [one for one in found if one.verdict == "other sign" and not one.difference]
        lead += f" Left out are {left} whose interval holds the published size as well." if left else ""
        lead += (
            f" On neither side: {listed([repr(one.claim.name) for one in even])}, with a difference of 0."
            if even
            else ""
        )
        text += f"## What points the other way\n\n{lead}\n\n{_with_reasons(of, shown)}"
    return text


def another_size(of: Comparison) -> str:
    """The claims whose side is the paper's and whose size is not: the published one is beyond the interval."""
    found = [
        one
        for one in of_paper(of)
        if isinstance(one, Finding) and one.published_inside is False and one.difference * one.claim.side > 0
    ]
    smaller = [one for one in found if abs(one.difference) < abs(one.claim.published or 0)]
    larger = [one for one in found if one not in smaller]
    if not found:
        return ""
    text = (
        "## Effects of another size than published\n\nOn the paper's side, but its size lies outside the interval.\n\n"
    )
    text += f"Smaller; reasons are guesses. {_with_reasons(of, smaller)}" if smaller else ""
    return text + ("Larger:\n\n" + "".join(f"- {clause(one)}\n" for one in larger) if larger else "")


def _with_reasons(of: Comparison, found: Sequence[Finding]) -> str:
    by_reason: dict[str, list[Finding]] = {}
    for one in found:
        by_reason.setdefault(one.claim.reason, []).append(one)
    text = ""
    for reason, some in by_reason.items():
        lines = [f"- {clause(one)}\n" for one in some]
        text += f"{reason[0].upper()}{reason[1:]}.{_tested(of, reason, some)}\n\n{''.join(lines)}\n"
    return text


def _tested(of: Comparison, reason: str, shown: Sequence[Finding]) -> str:
    """What a question of ours says of a reason, where it is not what the reason is given for."""
    claim, speaks_for = TESTED.get(reason, (None, True))
    test = of.findings[claim] if claim else None
    if not isinstance(test, Finding) or test in shown:
        return ""
    says = "leaves it open"
    if test.verdict in VERDICTS[:2]:
        says = "speaks for it" if (test.verdict == VERDICTS[0]) == speaks_for else "speaks against it"
    return f' Our own test, "{test.claim.name}", {says}: {interval(test)}, {certainty(test)}.'


def claim_tables(of: Comparison) -> str:
    """A table a section of claims."""
    assessed = sum(isinstance(one, Finding) for one in of.findings.values())
    text = (
        "## Claims\n\nDifference of the two sides of each claim, over the seeds that all its models have, with its"
        f" 95% interval. p is two-sided, with Holm's correction over the {assessed} claims assessed; a verdict goes by"
        f" the interval alone. The published size is taken as exact, though it has a spread of its own. Intervals are"
        " of what training with other seeds would give on these 10,000 test images; that other images would give"
        f" another difference is not in them.{_mark(of)}\n\n{caveats.noise(of)}"
    )
    columns = ("Claim", "Place", "Published", "Ours [95%]", "Seeds", "p (Holm)", "Verdict", "Published size inside")
    for title, claims in SECTIONS.items():
        body = []
        for claim in claims:
            one, published = of.findings[claim], signed(claim.published, claim.metric)
            name = f"{claim.name} {LATE}" if claim.late else claim.name
            if isinstance(one, Pending):
                body.append([name, claim.place, published, "", "", "", verdict_of(one), ""])
                continue
            inside = {None: "", True: "yes", False: "no"}[one.published_inside]
            shown = [interval(one), str(len(one.seeds)), p_value(one.p_holm), verdict_of(one), inside]
            body.append([name, claim.place, published, *shown])
        text += f"### {title}: claims\n\n{markdown_table(columns, body, words=('Place', 'Verdict'))}\n"
    return text


def _mark(of: Comparison) -> str:
    return f" {LATE}: written down when its runs were seen already." if any(one.late for one in of.findings) else ""
