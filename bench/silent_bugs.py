"""Silent bugs of other frameworks, played here, and clean runs: what `meshwise check` says of them by default.

    python bench/silent_bugs.py [--year 2026] [--minutes M] [--clean 200] [--only WORD] [--again | --missed]

Claims: at least 95 % of the bugs are found, at least 90 % with the right module and 80 % with the right cause, and
nothing is found in clean runs. Each bug, and what would be right of it, stands in tests/equivalence/silent_bugs.py;
clean runs are cases of tests/equivalence/plans_to_check.py on two devices and of decoders.py, each with a seed of its
own. What the last result has is kept, so that the script goes on where it was stopped; `--again` begins anew, and
`--missed` plays those rows again that are not right in all.

`--year 2026`: another list, of threads of 2025 and 2026 (tests/equivalence/silent_bugs_2026.csv), whose clean runs are
the same scripts without the bugs, and jobs in fp16. What the first play of it said stays in its result, as `first`,
beside the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
from equivalence import Pools, commit
from keep import RESULTS, keep

sys.path.insert(0, str(Path(__file__).parents[1]))
from meshwise.equivalence.proof import Proof
from meshwise.spec.errors import MeshwiseError
from meshwise.spec.plan import Plan
from tests.equivalence import decoders, silent_bugs, silent_bugs_2026
from tests.equivalence.jobs_to_check import checked
from tests.equivalence.plans_to_check import cases
from tests.equivalence.silent_bugs import NOT_PLAYED, SILENT
from tests.pool import CaseFailed

UNEQUAL = {"decoder, two words ahead": "data", "experts, counted": "data", "decoder, a number is read": "data"}
"""Decoders that differ on ranks with samples of their own, as they are written."""
PLANS = (
    Plan(data=2), Plan(shard=2, accumulate=2), Plan(tensor=2), Plan(context=2), Plan(pipeline=2, accumulate=2),
    Plan(data=2, zero1=True, recompute="full"), Plan(tensor=2, recompute="full"), Plan(shard=2, recompute="selective"),
)  # fmt: skip
RIGHT = ("found", "kind right", "module right", "cause right")


@dataclass(frozen=True)
class Row:
    """A bug to play. told: what the result says of it beside what was found."""

    name: str
    of: str
    told: dict[str, Any]
    judged: Callable[[Pools], dict[str, Any]]


@dataclass(frozen=True)
class List:
    """A list of bugs and of clean runs: name of a run -> what proves it."""

    name: str
    size: int
    rows: list[Row]
    clean: dict[str, Callable[[Pools], Proof]]


def first_list(clean: int) -> List:
    """That of tests/equivalence/silent_bugs.py. Its size counts the rows that are not played."""
    rows = []
    for bug in sorted(SILENT, key=lambda bug: (bug.plan.devices, bug.job)):
        told = {key: value for key, value in asdict(bug).items() if key not in ("plant", "row")}
        rows.append(Row(bug.row, bug.of, {**told, "plan": repr(bug.plan)}, partial(silent_bugs.judged, bug)))
    runs = {
        f"{name}, {plan!r}, seed {seed}": partial(_of_job, name, plan, seed, False)
        for name, plan, seed in clean_runs(clean)
    }
    return List("silent_bugs", 80, rows, runs)


def list_of_2026() -> List:
    """That of tests/equivalence/silent_bugs_2026.csv."""
    threads = silent_bugs_2026.threads()
    rows = [Row(each.row, each.of, asdict(each), partial(silent_bugs_2026.judged, each)) for each in threads]
    runs: dict[str, Callable[[Pools], Proof]] = {
        name: partial(silent_bugs_2026.played, text, plan) for name, (text, plan) in silent_bugs_2026.twins().items()
    }
    runs |= {f"{job}, {plan!r}": partial(_of_job, job, plan, 0, True) for job, plan in silent_bugs_2026.FP16}
    return List("silent_bugs_2026", len(threads), rows, runs)


def _of_job(name: str, plan: Plan, seed: int, rounding: bool, pools: Pools) -> Proof:
    return checked(pools, name, plan, seed=seed, rounding=rounding)


def clean_runs(count: int) -> list[tuple[str, Plan, int]]:
    """Job, plan and seed of each clean run, no two alike."""
    small = {"plain", "dropped", "tied", "counting", "normed", "weighed", "biased", "sampling"}
    found = [(name, plan) for plan, name in product(PLANS, decoders.DECODERS) if _is_right(name, plan)]
    found += [(name, plan) for plan, name in product(PLANS[:2], sorted(small))]
    found += [(case.model, case.plan) for case in cases() if case.plan.devices == 2 and not case.refused and case.quick]
    return [(name, plan, seed + 1) for seed, (name, plan) in enumerate((found * 3)[:count])]


def _is_right(name: str, plan: Plan) -> bool:
    samples_apart = plan.data * plan.shard > 1
    staged = plan.pipeline == 1 or name not in ("experts, balanced", "decoder, its layers twice")
    return staged and not (samples_apart and name in UNEQUAL)


def clean(prove: Callable[[Pools], Proof], pools: Pools) -> dict[str, Any]:
    """Whether a check of what is right says so."""
    cloudpickle.register_pickle_by_value(decoders)
    try:
        proof = prove(pools)
    except (CaseFailed, MeshwiseError) as failed:
        return {"commit": commit(), "refused" if silent_bugs_2026.is_ours(failed) else "failed": str(failed)}
    first = proof.comparison.first
    said = "; ".join(proof.doubts) if first is None else f"{first.kind} of {first.name!r}"
    return {"commit": commit(), "equal": proof.equal and not proof.doubts, "said": said}


def counts(bugs: dict[str, Any]) -> dict[str, Any]:
    """How many rows are right in what; those that are not of a list of others ("also") are left out."""
    of_list = [found for row, found in bugs.items() if not row.startswith("also")]
    return {"played": len(of_list), **{key: sum(found[key] for found in of_list) for key in RIGHT}}


def summary(listed: List, bugs: dict[str, Any], runs: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """The counts, and each row that is not right in all."""
    share = ("found", "cause right") if first else ("found", "module right", "cause right")
    checked_runs = [run | {"run": name} for name, run in runs.items() if "equal" in run]
    return {
        "rows of the list": listed.size,
        **({"the first play": counts(first)} if first else {}),
        **counts(bugs),
        "clean runs": len(checked_runs),
        "false alarms": [run for run in checked_runs if not run["equal"]],
        "refused": sum("refused" in run for run in runs.values()),
        "failed": [run | {"run": name} for name, run in runs.items() if "failed" in run],
        "missed in some way": {row: found["said"] for row, found in bugs.items() if not all(found[k] for k in share)},
    }


def judged(row: Row, pools: Pools) -> dict[str, Any]:
    """What a check says of a row."""
    try:
        return row.judged(pools)
    except (CaseFailed, TimeoutError) as failed:
        return silent_bugs.in_words(f"failed: {str(failed)[-400:]}", (), found=False)


def play(listed: List, options: argparse.Namespace, pools: Pools, bugs: dict[str, Any], ends: float) -> None:
    """The rows that are asked for and not known yet, until the time is over."""
    for row in listed.rows:
        asked = options.only in (row.name, "") or options.only in row.of
        right = all(bugs.get(row.name, {}).get(key) for key in ("found", "cause right"))
        known = row.name in bugs and (right or not options.missed)
        if (not options.only and known) or not asked or time.monotonic() > ends:
            continue
        bugs[row.name] = {**row.told, **judged(row, pools), "commit": commit()}
        found = bugs[row.name]
        print(row.name, *(key for key in ("found", *RIGHT[2:]) if found[key]), found["said"], flush=True)


def main() -> None:
    """Run what is left, as long as there is time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--year", type=int, choices=(2026,))
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--missed", action="store_true")
    options = parser.parse_args()
    listed = list_of_2026() if options.year else first_list(options.clean)
    path = RESULTS / f"{listed.name}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    first: dict[str, Any] = known.get("first", {})
    bugs: dict[str, Any] = {} if options.again else known.get("bugs", {})
    runs: dict[str, Any] = {} if options.again else known.get("runs", {})
    ends, pools = time.monotonic() + 60 * options.minutes, Pools()
    scripts = tempfile.TemporaryDirectory()
    os.chdir(scripts.name)
    try:
        play(listed, options, pools, bugs, ends)
        for name, prove in {} if options.only else listed.clean.items():
            if name not in runs and time.monotonic() < ends:
                runs[name] = clean(prove, pools)
                print(name, {key: value for key, value in runs[name].items() if key != "commit"}, flush=True)
    finally:
        if options.year:
            first = bugs | first
        beside = {"first": first} if options.year else {"not played": NOT_PLAYED}
        result = {"summary": summary(listed, bugs, runs, first), "bugs": bugs, "runs": runs}
        keep(listed.name, result | beside)
        pools.close()
        scripts.cleanup()
    print(json.dumps(summary(listed, bugs, runs, first), indent=1))


if __name__ == "__main__":
    main()
