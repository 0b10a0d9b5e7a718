"""Faults as the command line has them."""

from __future__ import annotations

import pytest

from meshwise.spec.errors import UsageError
from meshwise.spec.faults import Fault, faults_of, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:rank=2,step=40", Fault("kill", 2, 40)),
        ("raise:step=3, rank=0, phase=backward,attempt=2", Fault("raise", 0, 3, "backward", 2)),
        ("slow 20ms:rank=1,step=5,phase=data", Fault("slow", 1, 5, "data", seconds=0.02)),
    ],
)
def test_what_is_written_is_read_and_written_again(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil:rank=1,step=2", "Did you mean 'kill'"),
        ("kill", "rank and step is missing"),
        ("kill:rank=1", r"step is missing\. Write --fault kill:rank=1,step=40"),
        ("kill:rank=1,step=0", "step='0' is not a whole number of at least 1"),
        ("kill:rank=-1,step=2", "rank='-1' is not a whole number of at least 0"),
        ("kill:rank=1,step=2,phase=sleep", "Use one of data, forward, backward"),
        ("kill:rank=1,step=2,when=now", "field='when' is not known"),
        ("kill:rank=1,rank=2,step=2", "given twice"),
        ("slow:rank=1,step=2", "slow needs a duration"),
        ("kill 20ms:rank=1,step=2", "kill takes no duration"),
    ],
)
def test_anything_else_is_answered(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_fault(text)


def test_a_rank_that_there_is_not_has_no_fault() -> None:
    assert faults_of(["kill:rank=1,step=2"], 2) == (Fault("kill", 1, 2),)
    with pytest.raises(UsageError, match=r"the run has 2 ranks\. Name one of 0 to 1"):
        faults_of(["kill:rank=2,step=2"], 2)
