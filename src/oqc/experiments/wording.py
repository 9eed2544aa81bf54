"""A finding in words: its verdict, its interval, its line in a list."""

from __future__ import annotations

from collections.abc import Sequence

from oqc.experiments.claims import OURS
from oqc.experiments.comparison import Comparison
from oqc.report.markdown import bound, form_of, p_value, plural, signed
from oqc.report.statistics import VERDICTS, Finding, Pending

_OWN = {"reproduced": "confirmed", "contradicted": "refuted"}


def verdict_of(one: Finding | Pending) -> str:
    """The verdict in words; of what the paper does not claim nothing can be reproduced."""
    if isinstance(one, Pending):
        return one.why
    return _OWN.get(one.verdict, one.verdict) if one.claim.place == OURS else one.verdict


def decided(of: Comparison) -> list[Finding]:
    """Those whose interval excludes 0."""
    return [one for one in of.findings.values() if isinstance(one, Finding) and one.verdict in VERDICTS[:2]]


def interval(found: Finding) -> str:
    """The difference with its interval, whose ends have as many digits as show their side of 0."""
    metric = found.claim.metric
    low, high = (bound(end, form_of(metric)) for end in (found.low, found.high))
    return f"{signed(found.difference, metric)} [{low}, {high}]"


def clause(found: Finding) -> str:
    claim, unit = found.claim, " points" if found.claim.metric == "best" else ""
    published = "" if claim.published is None else f": {signed(claim.published, claim.metric)}"
    return f"**{claim.name}** ({claim.place}{published}): ours {interval(found)}{unit}, {certainty(found)}"


def certainty(found: Finding) -> str:
    """How many seeds it rests on, and its p."""
    return f"{plural(len(found.seeds), 'seed')}, p (Holm) {p_value(found.p_holm)}"


def listed(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), *parts[-1:]]) if len(parts) > 1 else "".join(parts)
