"""Every model under every plan, and fifty clean runs more: how far each is from one device, in float64.

    python bench/equivalence.py [--only WORD] [--seeds 52]

Claims: no difference above 1e-9 after five steps, no false alarm over runs that differ in model, plan and seed. What is
refused is told with what was said. With `--only` the cases whose name holds the word replace those of the last result.
The same cases and the same code as in tests/equivalence, where what each technique is for is asserted too.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from base64 import urlsafe_b64encode
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import transformers
from machine import RESULTS, keep

sys.path.insert(0, str(Path(__file__).parents[1]))
from meshwise.equivalence.sizes import LIMIT
from meshwise.spec.plan import Plan
from tests.equivalence.jobs_to_check import checked, job_named
from tests.equivalence.plans_to_check import NAMES, STEPS, Case, cases
from tests.pool import CaseFailed, Pool


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
    try:
        proof = checked(pools, model, plan, seed=seed, steps=STEPS, rounding=plan.precision == "bf16")
    except CaseFailed as failed:
        if failed.kind != "PlanError":
            raise
        return {**about, "refused": failed.text}
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


def clean_runs(pools: Pools, count: int) -> list[dict[str, Any]]:
    """Checks of which each has another model, plan and seed than every other."""
    labels = list(dict.fromkeys(case.label for case in cases()))
    found: dict[str, Case] = {str(case): case for case in cases() if not case.refused}
    runs: list[dict[str, Any]] = []
    for number in range(10 * count):
        name = f"{NAMES[number % len(NAMES)]}-{labels[(number + number // len(labels)) % len(labels)]}"
        case = found.pop(name, None)
        if case is not None and len(runs) < count:
            runs.append(outcome(pools, case.model, case.plan, seed=number + 1))
            tell(case, runs[-1])
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
    """The package of a class; `meshwise.jobs` and `tests.equivalence` are ours."""
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
    said = "refused" if "refused" in result else f"equal {result['equal']}  {max(result['largest'].values()):.1e}"
    print(f"{case}  seed {result['seed']}: {said}", flush=True)


def main() -> None:
    """Run the cases that are asked for, and write the result."""
    words = argparse.ArgumentParser()
    words.add_argument("--only", default="")
    words.add_argument("--seeds", type=int, default=52)
    asked = words.parse_args()
    path, pools = RESULTS / "equivalence.json", Pools()
    earlier = json.loads(path.read_text()) if asked.only and path.exists() else {"measured": {}, "clean_runs": []}
    measured = {str(case): earlier["measured"].get(str(case)) for case in cases()}
    runs = earlier["clean_runs"]
    try:
        for case in cases():
            if asked.only in str(case):
                measured[str(case)] = {"label": case.label, **outcome(pools, case.model, case.plan)}
                tell(case, measured[str(case)])
                write(measured, runs)
        runs = runs or clean_runs(pools, asked.seeds)
    finally:
        pools.close()
        write(measured, runs)


def write(measured: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Write what is there so far; a case that was not run is left out."""
    found = {name: result for name, result in measured.items() if result is not None}
    equal = [result for result in found.values() if result.get("equal")]
    sizes = [max(result["largest"].values()) for result in [*equal, *runs]]
    keep(
        "equivalence",
        {
            "transformers": transformers.__version__,
            "claims": {"largest": f"<= {LIMIT}", "false_alarms": 0},
            "steps": STEPS,
            "cases": len(found),
            "equal": len(equal),
            "refused": sum("refused" in result for result in found.values()),
            "largest": max(sizes, default=0.0),
            "clean_runs_made": len(runs),
            "false_alarms": sum(not run["equal"] for run in [*found.values(), *runs] if "refused" not in run),
            "seconds": round(sum(result.get("seconds", 0) for result in [*found.values(), *runs])),
            "models": about_models(),
            "measured": found,
            "clean_runs": runs,
        },
    )


if __name__ == "__main__":
    main()
