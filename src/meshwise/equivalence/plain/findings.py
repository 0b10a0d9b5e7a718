"""Define what a check of a plain script finds.

A plain script is one that does not use meshwise. Tested in tests/equivalence/test_plain_scripts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.equivalence.proof import Verdict


@dataclass(frozen=True)
class Finding:
    """One thing that a check of a script without meshwise found.

    kind: a short name.
    wrong: False for a difference by design, or a note.
    places: the source lines of the script.
    evidence: a sentence on what was seen.
    instead: a sentence on what to write instead. Empty if there is nothing to change.
    """

    kind: str
    wrong: bool
    places: tuple[str, ...]
    evidence: str
    instead: str = ""


@dataclass(frozen=True)
class PlainProof:
    """The result of checking a script that does not use meshwise: whether its ranks compute what one process computes
    on the same samples, and what the counts of samples and steps show.

    steps: how many steps were compared.
    epochs: how many epochs the steps belong to.
    largest: the largest difference of a gradient, relative to the largest gradient.
    not_judged: sentences on what could not be judged.
    """

    script: str
    devices: str
    steps: int
    epochs: int
    largest: float
    findings: tuple[Finding, ...]
    not_judged: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict: different if a finding is wrong, doubtful if not everything could be judged, else equal."""
        if any(finding.wrong for finding in self.findings):
            return Verdict.DIFFERENT
        return Verdict.DOUBTFUL if self.not_judged else Verdict.EQUAL

    @property
    def equal(self) -> bool:
        """Whether nothing is wrong, and everything could be judged."""
        return self.verdict is Verdict.EQUAL
