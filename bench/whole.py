"""Untouched training programs with the whole view on 1, 2 and 3 ranks and by plans, beside the same without our line.

    python bench/whole.py [--only WORD] [--kind KIND] [--again]

Claims: at least 57 of the 60 programs and more of tests/whole are equal to the untouched program on one device, within
1e-9 in float64, on each number of ranks; the rest are refused by name; none is wrong, fails otherwise or waits for
ever. A model that begins to mix rows at a later call is equal, or refused within 64 calls. A program that the last
result has is not run again, unless its text or the code has changed since; `--only` runs those whose name holds WORD.
By plans (`--kind shard`), at least 40 are equal, and the rest are refused or end in torch's own error.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

from keep import RESULTS, keep

sys.path.insert(0, str(Path(__file__).parents[1]))
from meshwise.spec import errors
from tests.pool import CaseFailed, Pool
from tests.whole.running import PROGRAMS, SWITCHES, Program, apart, run, whole

ROOT = Path(__file__).parents[1]
KINDS = {
    "1": (1, ""),
    "2": (2, ""),
    "3": (3, ""),
    "shard": (2, "shard = 2"),
    "zero1": (2, "data = 2\nzero1 = true"),
    "recompute": (2, 'data = 2\nrecompute = "full"'),
    "data x tensor": (4, "data = 2\ntensor = 2"),
}
"""Ranks, and the plan file."""
BOUND, LIMIT = 1e-9, 60.0
OURS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.MeshwiseError)
}


def code() -> str:
    """The last commit of the code and of what the programs share, with a `+` where they were changed after it."""
    places = ("--", "src", "tests/whole/shared.py", "tests/whole/running.py")

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h", *places) + "+" * bool(git("status", "--short", *places))


def outcome(pool: Pool, program: Program, want: Any) -> dict[str, Any]:
    """What a program came to on the ranks of a pool."""
    began = time.perf_counter()
    try:
        results = pool.run(whole, program, timeout=LIMIT)
    except CaseFailed as failed:
        kind = "refused" if failed.kind in OURS else "failed"
        found: dict[str, Any] = {"outcome": kind, "said": f"{failed.kind}: {failed.text}"[:600]}
    except TimeoutError as late:
        found = {"outcome": "stuck", "said": str(late)[:2000]}
    else:
        far, at = max(apart(got, want) for got in results)
        alike = max(apart(got, results[0])[0] for got in results)
        found = {"outcome": "equal" if far <= BOUND else "WRONG", "difference": far, "at": at, "ranks apart": alike}
    return found | {"seconds": round(time.perf_counter() - began, 3)}


def told(programs: dict[str, Any]) -> dict[str, Any]:
    """How many came to what: programs by ranks and plan, and switches beside them."""
    groups = {"programs": PROGRAMS, "switches": SWITCHES}
    return {
        f"{group}, {kind}": Counter(programs[n][kind]["outcome"] for n in names if kind in programs.get(n, {}))
        for group, names in groups.items()
        for kind in KINDS
    }


def pool_of(kind: str) -> Pool:
    """Workers that run by a plan."""
    size, plan = KINDS[kind]
    if not plan:
        return Pool(size)
    file = Path(tempfile.mkdtemp()) / "plan.toml"
    file.write_text(plan + "\n")
    return Pool(size, MESHWISE_PLAN=str(file))


def main() -> None:
    """Run what is missing, keep each program's result at once, and say what is not equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="WORD", default="", help="programs whose name holds it")
    parser.add_argument("--kind", choices=KINDS, help="by default, 1, 2 and 3 ranks")
    parser.add_argument("--again", action="store_true", help="run all anew")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
    path, all_names = RESULTS / "whole.json", PROGRAMS | SWITCHES
    kept = json.loads(path.read_text())["programs"] if path.exists() else {}
    done = {name: result for name, result in kept.items() if name in all_names}
    at = code()
    for kind in [options.kind] if options.kind else ["1", "2", "3"]:
        pool = pool_of(kind)
        for name, program in all_names.items():
            of = f"{at} {sha256(inspect.getsource(program).encode()).hexdigest()[:12]}"
            known = done.setdefault(name, {}).get(kind, {}).get("of") == of and not options.again
            if options.only not in name or (known and not options.only):
                continue
            found = done[name][kind] = {"of": of} | outcome(pool, program, run(program))
            if found["outcome"] != "equal":
                print(f"{name}, {kind}: {found['outcome']}, {found.get('said') or (found['difference'], found['at'])}")
            keep("whole", {"claim": f"equal to {BOUND}", "totals": told(done), "programs": done})
        pool.close()
    print(json.dumps(told(done), indent=1))


if __name__ == "__main__":
    main()
