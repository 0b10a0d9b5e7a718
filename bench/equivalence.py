"""Every model under every plan, and fifty clean runs more: how far each is from one device, in float64.

    python bench/equivalence.py [--only WORD] [--missing] [--minutes M] [--seeds 52]
    python bench/equivalence.py --table

Claims: no difference above 1e-9 after five steps, no false alarm over runs that differ in model, plan and seed. What is
refused is told with what was said. With `--only` the cases whose name holds the word replace those of the last result;
`--missing` runs those that have none or are of other code than this. Each result says of which commit of the code and
the suite it is, with a `+` where they were changed after it. The same cases and the same code as in tests/checker,
where what each technique is for is asserted too. `--table` writes docs/internals/models.md (models_page.py).
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections import Counter
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import transformers
from keep import keep, kept, machine
from models_page import write_page

sys.path.insert(0, str(Path(__file__).parents[1]))
from meshwise.checker.check import uncompiled_plan
from meshwise.checker.difference import LIMIT
from meshwise.spec.plan import Plan
from tests.checker.jobs_to_check import checked, job_named
from tests.checker.plans_to_check import NAMES, STEPS, Case, cases
from tests.pool import CaseFailed, Pool

ROOT = Path(__file__).parents[1]


class Pools:
    """Workers, started once for each number of them."""

    def __init__(self) -> None:
        self._made: dict[int, Pool] = {}

    def __call__(self, size: int) -> Pool:
        if size not in self._made:
            self._made[size] = Pool(size)
        return self._made[size]

    def close(self) -> None:
        for made in self._made.values():
            made.close()


def outcome(pools: Pools, model: str, plan: Plan, seed: int = 0) -> dict[str, Any]:
    """One check: whether it is equal, the largest relative difference of each kind, and how long it took."""
    began = time.perf_counter()
    about: dict[str, Any] = {"model": model, "plan": repr(plan), "devices": plan.devices, "seed": seed}
    about["commit"] = commit()
    said: list[str] = []
    uncompiled_plan(plan, said.append)
    if said:
        return {**about, "not_checked": said[0]}
    try:
        proof = checked(pools, model, plan, seed=seed, steps=STEPS, rounding=plan.precision == "bf16")
    except CaseFailed as failed:
        return {**about, "refused" if failed.kind == "PlanError" else "failed": failed.text}
    first = proof.comparison.first
    return {
        **about,
        "equal": proof.equal,
        "first": None if first is None else [first.kind, first.step, first.name, first.relative],
        "cause": None if proof.cause is None else proof.cause.name,
        "largest": {c.kind: c.largest.relative for c in proof.comparison.kinds if c.largest is not None},
        "not_compared": list(proof.comparison.left_out),
        "rounding": {r.kind: [r.one_device, r.plan] for r in proof.rounding},
        "seconds": round(time.perf_counter() - began, 2),
    }


@cache
def commit() -> str:
    """The last commit of the code and the suite that this process runs, with a `+` where they were changed after it."""
    places = ("--", "src", "tests/checker")

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h", *places) + "+" * bool(git("status", "--short", *places))


def clean_runs(count: int) -> list[tuple[Case, int]]:
    """Cases with seeds, of which each has another model, plan and seed than every other."""
    labels = list(dict.fromkeys(case.label for case in cases() if not case.plan.compile))
    found: dict[str, Case] = {str(case): case for case in cases() if not case.refused}
    runs: list[tuple[Case, int]] = []
    for number in range(10 * count):
        name = f"{NAMES[number % len(NAMES)]}-{labels[(number + number // len(labels)) % len(labels)]}"
        case = found.pop(name, None)
        if case is not None and len(runs) < count:
            runs.append((case, number + 1))
    return runs


@cache
def about_models() -> dict[str, dict[str, Any]]:
    """For each model its size, where its classes come from, and how many of their lines were changed for meshwise."""
    found = {}
    for name in NAMES:
        model = job_named(name).model()
        kinds = sorted({type(module) for module in model.modules()}, key=lambda kind: kind.__qualname__)
        found[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "source": ", ".join(sorted({_source(kind) for kind in kinds})),
            "lines_changed": sum(changed_lines(kind) for kind in kinds),
        }
    return found


def _source(kind: type) -> str:
    """The package of a class; `meshwise.training.jobs` and `tests.checker` are ours."""
    parts = kind.__module__.split(".")
    return ".".join(parts[: 1 + (parts[0] in ("meshwise", "tests"))])


@cache
def changed_lines(kind: type) -> int:
    """Lines of a class that were written for meshwise: that name it, or, in an installed package, all lines of a file
    that is not the package's own any more."""
    package, file = kind.__module__.split(".")[0], Path(inspect.getfile(kind))
    if package in ("torch", "transformers"):
        entries = [entry for entry in metadata.files(package) or [] if entry.name == file.name]
        own = next((entry.hash for entry in entries if entry.locate() == file), None)
        digest = urlsafe_b64encode(sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
        return 0 if own is not None and own.value == digest else len(inspect.getsource(kind).splitlines())
    return sum("meshwise" in line or "mw." in line for line in inspect.getsource(kind).splitlines())


def tell(case: Case, result: dict[str, Any]) -> None:
    """One line a check."""
    other = next((word for word in ("refused", "failed", "not_checked") if word in result), None)
    said = other or f"equal {result['equal']}  {max(result['largest'].values()):.1e}"
    print(f"{case}  seed {result['seed']}: {said}", flush=True)


def main() -> None:
    """Run the cases that are asked for, and write the result."""
    words = argparse.ArgumentParser()
    words.add_argument("--only", default="")
    words.add_argument("--missing", action="store_true")
    words.add_argument("--minutes", type=float, default=float("inf"), help="after which no new case is begun")
    words.add_argument("--seeds", type=int, default=52)
    words.add_argument("--table", action="store_true")
    asked = words.parse_args()
    if asked.table:
        write_page(kept("equivalence"))
        return
    pools, until = Pools(), time.monotonic() + 60 * asked.minutes
    commit()  # now: this process keeps the code that it began with
    earlier = (kept("equivalence") if asked.only or asked.missing else {}) or {"measured": {}, "clean_runs": []}
    measured = {str(case): earlier["measured"].get(str(case)) for case in cases()}
    runs = earlier["clean_runs"]
    made = {(run["model"], run["plan"]) for run in runs}
    seeds = [run["seed"] for run in runs]
    due = [case for case in cases() if is_due(asked, str(case), measured[str(case)])]
    try:
        for case in due:
            if time.monotonic() < until:
                measured[str(case)] = {"label": case.label, **outcome(pools, case.model, case.plan)}
                tell(case, measured[str(case)])
                write(measured, runs)
        for case, seed in clean_runs(2 * asked.seeds):
            fresh = (case.model, repr(case.plan)) not in made and seed not in seeds
            if fresh and len(runs) < asked.seeds and time.monotonic() < until:
                runs.append(outcome(pools, case.model, case.plan, seed=seed))
                tell(case, runs[-1])
                write(measured, runs)
    finally:
        pools.close()
        write(measured, runs)


def is_due(asked: argparse.Namespace, name: str, earlier: dict[str, Any] | None) -> bool:
    """Whether a case is to be run, by the words of the command line."""
    return asked.only in name and not (asked.missing and earlier is not None and earlier.get("commit") == commit())


def write(measured: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Write what is there so far; a case that was not run is left out."""
    found = {name: result for name, result in measured.items() if result is not None}
    equal = [result for result in found.values() if result.get("equal")]
    sizes = [max(result["largest"].values()) for result in [*equal, *runs] if "largest" in result]
    result = {
        "transformers": transformers.__version__,
        "claims": {"largest": f"<= {LIMIT}", "false_alarms": 0},
        "steps": STEPS,
        "cases": len(found),
        "equal": len(equal),
        "refused": sum("refused" in result for result in found.values()),
        "failed": sum("failed" in result for result in found.values()),
        "not_checked": sum("not_checked" in result for result in found.values()),
        "commits": dict(Counter(result["commit"] for result in [*found.values(), *runs])),
        "largest": max(sizes, default=0.0),
        "clean_runs_made": len(runs),
        "false_alarms": sum(not run["equal"] for run in [*found.values(), *runs] if "equal" in run),
        "seconds": round(sum(result.get("seconds", 0) for result in [*found.values(), *runs])),
    }
    of_cases = {"machine": machine(), "models": about_models(), "measured": found, "clean_runs": runs}
    keep("equivalence", result, result | of_cases)


if __name__ == "__main__":
    main()
