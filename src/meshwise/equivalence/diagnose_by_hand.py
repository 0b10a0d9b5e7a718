"""Why outputs differ of a module in which a program exchanges by hand."""

from __future__ import annotations

from meshwise.equivalence.evidence import Evidence
from meshwise.spec.words import some


def sum_by_hand_is_missing(evidence: Evidence) -> str:
    """A module whose parameters a program has divided itself, and whose parts nobody adds up."""
    name, kind = evidence.first.name, evidence.first.facts["class"]
    parts = evidence.divided_by_hand(name)
    if not parts or evidence.exchanges_in(name, sums=True):
        return ""
    others = evidence.exchanges_in(name)
    there = f"; it exchanges in {some(others)}" if others else ""
    return (
        f"each rank works with its own part of {some(parts)}, and {name} ({kind}) adds nothing up over the ranks"
        f"{there}: an all_reduce of its result is missing."
    )


def exchanges_by_hand(evidence: Evidence) -> str:
    """A module whose outputs are wrong, and the lines in which it exchanges."""
    lines = evidence.exchanges_in(evidence.first.name)
    where = f"{evidence.first.name or 'the model'} ({evidence.first.facts['class']})"
    before = f"everything before it{evidence.not_seen(evidence.first.facts['at'])} is equal"
    text = f"{where} is the first whose outputs differ; {before}"
    return f"{text}. It exchanges by hand in {some(lines)}." if lines else ""
