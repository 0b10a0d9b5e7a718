"""Silent bugs of other frameworks, played here, and clean runs: what `meshwise check` says of them by default.

    python bench/silent_bugs.py [--minutes M] [--clean 200] [--only WORD] [--again]

Claims: at least 95 % of the bugs are found, at least 90 % with the right module and 80 % with the right cause, and
nothing is found in clean runs. Each bug, and what would be right of it, stands in tests/equivalence/silent_bugs.py;
clean runs are cases of tests/equivalence/plans_to_check.py on two devices and of decoders.py, each with a seed of its
own. What the last result has is kept, so that the script goes on where it was stopped; `--again` begins anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
from equivalence import Pools, commit
from keep import RESULTS, keep

sys.path.insert(0, str(Path(__file__).parents[1]))
from meshwise.spec.plan import Plan
from tests.equivalence import decoders
from tests.equivalence.jobs_to_check import checked
from tests.equivalence.plans_to_check import cases
from tests.equivalence.silent_bugs import NOT_PLAYED, SILENT, judged
from tests.pool import CaseFailed

UNEQUAL = {"decoder, two words ahead": "data", "experts, counted": "data", "decoder, a number is read": "data"}
"""Decoders that differ on ranks with samples of their own, as they are written."""
PLANS = (
    Plan(data=2), Plan(shard=2, accumulate=2), Plan(tensor=2), Plan(context=2), Plan(pipeline=2, accumulate=2),
    Plan(data=2, zero1=True, recompute="full"), Plan(tensor=2, recompute="full"), Plan(shard=2, recompute="selective"),
)  # fmt: skip


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


def clean(pools: Pools, name: str, plan: Plan, seed: int) -> dict[str, Any]:
    """Whether a check of a job that is right says so."""
    cloudpickle.register_pickle_by_value(decoders)
    about: dict[str, Any] = {"job": name, "plan": repr(plan), "seed": seed, "commit": commit()}
    try:
        proof = checked(pools, name, plan, seed=seed)
    except CaseFailed as failed:
        if failed.kind != "PlanError":
            return {**about, "failed": f"{failed.kind}: {failed.text}"}
        return {**about, "refused": failed.text}
    first = proof.comparison.first
    return {**about, "equal": proof.equal, "said": "" if first is None else f"{first.kind} of {first.name!r}"}


def summary(bugs: dict[str, Any], runs: dict[str, Any]) -> dict[str, Any]:
    """The counts, and each row that is not right in all."""
    of_list = [found for row, found in bugs.items() if row.startswith("SB")]
    share = {key: sum(found[key] for found in of_list) for key in ("found", "module right", "cause right")}
    missed = {row: found["said"] for row, found in bugs.items() if not all(found[key] for key in share)}
    checked_runs = [run for run in runs.values() if "equal" in run]
    return {
        "rows of the list": 80,
        "played": len(of_list),
        **share,
        "clean runs": len(checked_runs),
        "false alarms": [run for run in checked_runs if not run["equal"]],
        "refused": sum("refused" in run for run in runs.values()),
        "failed": [run for run in runs.values() if "failed" in run],
        "missed in some way": missed,
    }


def play(options: argparse.Namespace, pools: Pools, bugs: dict[str, Any], ends: float) -> None:
    """The rows that are asked for and not known yet, until the time is over."""
    left = [bug for bug in SILENT if (options.only in bug.of if options.only else bug.row not in bugs)]
    for bug in sorted(left, key=lambda bug: (bug.plan.devices, bug.job)):
        if time.monotonic() > ends:
            break
        try:
            found = judged(bug, pools)
        except (CaseFailed, TimeoutError) as failed:
            found = dict.fromkeys(("found", "kind right", "module right", "cause right"), False)
            found["said"] = f"failed: {str(failed)[-400:]}"
        told = {key: value for key, value in asdict(bug).items() if key not in ("plant", "row")}
        bugs[bug.row] = {**told, "plan": repr(bug.plan), **found, "commit": commit()}
        print(
            bug.row, *(key for key in ("found", "module right", "cause right") if found[key]), found["said"], flush=True
        )


def main() -> None:
    """Run what is left, as long as there is time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    path = RESULTS / "silent_bugs.json"
    known = json.loads(path.read_text()) if path.exists() and not options.again else {}
    bugs: dict[str, Any] = known.get("bugs", {})
    runs: dict[str, Any] = known.get("runs", {})
    ends, pools = time.monotonic() + 60 * options.minutes, Pools()
    try:
        play(options, pools, bugs, ends)
        for name, plan, seed in [] if options.only else clean_runs(options.clean):
            key = f"{name}, {plan!r}, seed {seed}"
            if key not in runs and time.monotonic() < ends:
                runs[key] = clean(pools, name, plan, seed)
                said = {k: v for k, v in runs[key].items() if k in ("equal", "refused", "failed", "said")}
                print(key, said, flush=True)
    finally:
        keep("silent_bugs", {"summary": summary(bugs, runs), "bugs": bugs, "not played": NOT_PLAYED, "runs": runs})
        pools.close()
    print(json.dumps(summary(bugs, runs), indent=1))


if __name__ == "__main__":
    main()
