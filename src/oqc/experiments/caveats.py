"""What the verdicts rest on: the gate's start of one model, our separation score, and the spread of a run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from oqc.analysis import SEPARATION
from oqc.experiments.claims import DYNAMIC, FULL, GATE_USE, LOWRANK, MAIN, OURS, STATIC, STATIC_CLOSED
from oqc.experiments.comparison import Comparison
from oqc.experiments.published import value
from oqc.experiments.wording import decided, interval, listed, verdict_of
from oqc.report.markdown import form_of, markdown_table, p_value, plural
from oqc.report.statistics import (
    SETTLED,
    VERDICTS,
    Cells,
    Claim,
    Finding,
    Pending,
    assess_all,
    cells,
    pooled_noise,
    seed_effect,
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


def one_model(of: Comparison) -> str:
    """How much of the verdicts turns on OQC-static, whose start is our reading of two statements that disagree."""
    shares = _shares(of, lambda claim: STATIC in claim.presets)
    if not shares:
        return ""
    return (
        f"OQC-static is one side of {shares}. Its gate starts at 0.5 here, as the paper's formula has it and its text"
        " does not (docs/deviations.md)."
    )


def our_score(of: Comparison) -> str:
    """How much of the verdicts is on a score whose formula is a guess."""
    shares = _shares(of, lambda claim: claim.metric == SEPARATION)
    told = "are on separation, a score that the paper has no formula of: ours is the nearest to its value for AFBO+PR"
    return f"{shares} {told}, of five." if shares else ""


def _shares(of: Comparison, belongs: Callable[[Claim], bool]) -> str:
    """`2 of the 3 reproduced and 1 of the 4 contradicted`, of the paper's claims."""
    known = Counter(one.verdict for one in decided(of) if one.claim.place != OURS)
    its = Counter(one.verdict for one in decided(of) if one.claim.place != OURS and belongs(one.claim))
    return " and ".join(f"{its[name]} of the {known[name]} {name}" for name in VERDICTS[:2] if its[name])


def other_start(of: Comparison) -> str:
    """The claims on OQC-static as they would be with its gate from 0.12, as far as either start decides them."""
    body, seeds = [], set[int]()
    for claim, one in of.findings.items():
        if STATIC not in claim.presets or STATIC_CLOSED in claim.presets or not isinstance(one, Finding):
            continue
        plus, minus = (tuple(STATIC_CLOSED if p == STATIC else p for p in side) for side in (claim.plus, claim.minus))
        (other,) = assess_all([replace(claim, plus=plus, minus=minus)], of.frozen)
        if isinstance(other, Finding) and not {one.verdict, other.verdict}.isdisjoint(VERDICTS[:2]):
            body.append([claim.name, interval(one), verdict_of(one), interval(other), verdict_of(other)])
            seeds |= set(other.seeds)
    if not body:
        return ""
    columns = ("Claim", "From 0.5", "Verdict", "From 0.12", "It would be")
    return (
        f"The same claims with static's gate from 0.12 ({plural(len(seeds), 'seed')}), as far as either start decides"
        f" them:\n\n{markdown_table(columns, body, words=('Verdict', 'It would be'))}"
    )


def gates(of: Comparison) -> str:
    """What the claims on gates rest on, where they hold."""
    found = [one for claim in GATE_USE if isinstance(one := of.findings[claim], Finding)]
    if not any(one.verdict == VERDICTS[0] for one in found):
        return ""
    paper = value("mechanism text", STATIC, "gate_mean").mean
    static = of.rows.get(STATIC, {}).get("gate_mean")
    ends = [
        f"{mean:.3f} ({name})"
        for name, preset in {"OQC full": FULL, "OQC-LR": LOWRANK, "OQC-static from there": STATIC_CLOSED}.items()
        if static is not None
        and (mean := of.rows.get(preset, {}).get("gate_mean")) is not None
        and abs(mean - paper) < abs(static - paper)
    ]
    others = f" Scalar gates that start at 0.12 end nearer to 0.190, at {listed(ends)}." if ends else ""
    spread = of.rows.get(DYNAMIC, {}).get("gate_token_std")
    measured = "the records of OQC-dynamic lack it" if spread is None else f"OQC-dynamic's is {spread:.3f}"
    return (
        "What is said of gates rests on our reading of the paper's 0.190 as static's, and on our starts: static's at"
        f" 0.5, dynamic's at 0.12.{others} A spread over tokens and blocks does not yet show that a gate depends on its"
        f" input, since a scalar gate has one over blocks; the one over tokens would (docs/metrics.md): {measured}."
    )


def noise(of: Comparison) -> str:
    """The standard deviation that intervals rest on, how far those of single models are from it, and the seeds."""
    body = []
    for metric, name in _METRICS.items():
        found = cells(of.frozen, metric)
        own = [statistics.stdev(some) for some in _by_preset(found) if len(some) > 2]
        try:
            known = pooled_noise(found)
        except ValueError:  # too few runs
            continue
        form = form_of(metric)
        spread = f"{min(own):{form}} to {max(own):{form}}" if own else ""
        body.append([name, f"{known.variance**0.5:{form}}", str(known.freedom), spread])
    if not body:
        return ""
    return (
        "Intervals rest on one standard deviation of a run, pooled over all models. Where single models' own are far"
        " apart, as they are for what is measured of features and gates, that is an approximation.\n\n"
        + markdown_table(("Metric", "Pooled", "Degrees of freedom", "Of single models, with the seeds' effect"), body)
        + _seeds(of)
        + _unpaired(of)
        + _by_main_table(of)
        + "\n"
    )


def _seeds(of: Comparison) -> str:
    p = seed_effect(cells(of.frozen))
    if p is None:
        return ""
    told = "do" if p < SETTLED else "show no"
    rest = (
        "have an effect of their own on accuracy, which the pairing takes out"
        if p < SETTLED
        else "effect on accuracy: pairing by seed gains nothing here, and leaves out runs that lack a partner"
    )
    return f"\nSeeds {told} {rest} (F test, p {p_value(p)}).\n"


def _unpaired(of: Comparison) -> str:
    """What would change if every claim rested on all runs of its models, by the additive fit of models and seeds."""
    fitted = assess_all(list(of.findings), [*of.frozen, *of.diverged], paired=False)
    known = _beside_ours(of, fitted)
    if not known:
        return ""
    changed = [b for a, b in known if a.verdict != b.verdict and {a.verdict, b.verdict} & set(VERDICTS[:2])]
    told = _would_be(changed) or "no other claim would be reproduced, confirmed, contradicted or refuted"
    return f"\nBy a fit of models and seeds to all runs, those without a partner too: {told}.\n"


def _by_main_table(of: Comparison) -> str:
    """What would change if the claims on features rested on the runs of the models that they are about alone."""
    main = [record for record in of.frozen if record["preset"] in MAIN.values()]
    claims = [claim for claim in of.findings if claim.metric in _OF_FEATURES]
    known = _beside_ours(of, assess_all(claims, main))
    if not known:
        return ""
    told = _would_be([b for a, b in known if a.verdict != b.verdict]) or "no verdict would change"
    return f"\nBy the spread of the main table's models alone, of {len(known)} claims on features: {told}.\n"


def _beside_ours(of: Comparison, others: Sequence[Finding | Pending]) -> list[tuple[Finding, Finding]]:
    """Each finding of the page with that of another assessment, where both have one."""
    pairs = [(of.findings[one.claim], one) for one in others]
    return [(a, b) for a, b in pairs if isinstance(a, Finding) and isinstance(b, Finding)]


def _would_be(found: Sequence[Finding]) -> str:
    return "; ".join(f'"{one.claim.name}" would be {verdict_of(one)} ({interval(one)})' for one in found)


def _by_preset(of: Cells) -> Sequence[list[float]]:
    found: dict[str, list[float]] = {}
    for (preset, _), one in of.items():
        found.setdefault(preset, []).append(one)
    return list(found.values())
