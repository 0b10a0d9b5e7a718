"""Define what a check of a plain script finds.

Tested in tests/equivalence/test_plain_scripts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.equivalence.proof import Verdict


@dataclass(frozen=True)
class Finding:
    """What a check of a plain script found. kind: in the field's words. wrong: false for a difference by design, or a
    note. places: the user's lines. evidence, instead: a sentence each."""

    kind: str
    wrong: bool
    places: tuple[str, ...]
    evidence: str
    instead: str = ""


@dataclass(frozen=True)
class PlainProof:
    """Whether a script's ranks compute what one process computes on the same samples, and what the counts show.

    steps: how many were compared, of so many epochs; largest: the largest difference of a gradient, relative to the
    largest. not_judged: sentences.
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
        """Different if something is wrong; doubtful if not all is judged. A difference by design is neither."""
        if any(finding.wrong for finding in self.findings):
            return Verdict.DIFFERENT
        return Verdict.DOUBTFUL if self.not_judged else Verdict.EQUAL

    @property
    def equal(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict is Verdict.EQUAL
