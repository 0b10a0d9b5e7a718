"""Which claim about devices each test of this folder is evidence for, and what of it passed.

A file says it by `pytestmark = pytest.mark.evidence("claim")`, with rung="R3" where the checker of races looks on.
`make evidence` keeps what passed, and writes docs/internals/evidence.md of it
(bench/evidence.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

KEEP = "MESHWISE_KEEP_EVIDENCE"
"""Names the file to write; unset, nothing is kept."""
RUNGS = ("R1", "R2", "R3")
_claims: dict[str, dict[str, Any]] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The claim goes with the test's report, which travels from the process that runs it."""
    mark = item.get_closest_marker("evidence")
    if mark is not None:
        (claim,), rung = mark.args, mark.kwargs.get("rung", "R2")
        assert rung in RUNGS, f"rung {rung!r} is none of {RUNGS}"
        file = item.path.relative_to(item.config.rootpath).as_posix()
        item.user_properties.append(("evidence", [claim, rung, file]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One test of a claim has ended, or one part of it went wrong."""
    for name, value in report.user_properties:
        if name == "evidence" and (report.when == "call" or report.outcome != "passed"):
            claim, rung, file = map(str, value)  # type: ignore[call-overload]
            known = _claims.setdefault(claim, {"rung": rung, "files": [], "passed": 0, "others": []})
            known["files"] = sorted({*known["files"], file})
            if report.outcome == "passed":
                known["passed"] += 1
            else:
                known["others"].append(f"{report.nodeid}: {report.outcome}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Only where the reports of all processes meet."""
    path = os.environ.get(KEEP)
    if path and _claims and not hasattr(session.config, "workerinput"):
        _keep(Path(path), dict(sorted(_claims.items())))


def _keep(path: Path, claims: Mapping[str, Any]) -> None:
    from bench.keep import machine

    path.write_text(json.dumps({"machine": machine(), "claims": claims}, indent=2) + "\n")
