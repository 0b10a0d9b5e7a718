"""Define what a check of a plain script finds.

A plain script is one that does not use meshwise. Tested in tests/equivalence/test_plain_scripts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.equivalence.proof import Verdict


@dataclass(frozen=True)
class Finding:
    """One result of checking a script that does not use meshwise.

    kind: a short name.
    wrong: whether the script should be changed. False for a note, and for a difference that the script's author may
        intend.
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
    """The result of checking a script that does not use meshwise. It says whether the ranks compute the same as one
    process on the same samples. It also says whether each sample is read once, and whether the schedule fits the number
    of steps.

    steps: how many steps were compared.
    epochs: how many epochs the steps belong to.
    largest: the largest difference of a gradient between the ranks and one process, relative to the largest gradient.
    findings: all that the check found.
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
        """Whether the script passes the check: no finding asks for a change, and everything could be judged."""
        return self.verdict is Verdict.EQUAL
