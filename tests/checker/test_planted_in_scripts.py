"""What somebody planted in right scripts of DDP, FSDP2, accelerate, Lightning and by hand, and the right scripts.

Tests checker/plain/judge.py and checker/plain/rules.py. The programs, with causes that were written before they ran,
are tests/programs/planted.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.checker.test_plain_scripts import proof

PLANTED = Path(__file__).parents[1] / "programs" / "planted"
CASES = tomllib.loads((PLANTED / "CASES.toml").read_text(encoding="utf-8"))["case"]


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("case", [pytest.param(case, id=case["file"]) for case in CASES])
def test_a_cause_is_named_and_the_right_script_is_not_wrong(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    right = wrong = (PLANTED / case["file"]).read_text(encoding="utf-8")
    for edit in case["edit"]:
        assert wrong.count(edit["right"]) == 1
        wrong = wrong.replace(edit["right"], edit["wrong"])
    found = [each.kind for each in proof(tmp_path, wrong).findings if each.wrong]
    assert found[:1] == [case["found"]], case["cause"]
    made = proof(tmp_path, right)
    assert made.verdict.value == case["right"] and made.largest == 0.0
