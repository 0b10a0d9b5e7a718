"""Untouched training programs with the whole view on 1, 2 and 3 ranks and by plans, beside the same without our line.

    python bench/whole.py [--only WORD] [--kind KIND] [--again]

Claims: at least 57 of the 60 programs and more of tests/training/whole are equal to the untouched program on one
device, within 1e-9 in float64, on each number of ranks; the rest are refused by name; none is wrong, fails otherwise or
waits for ever. A model that begins to mix rows at a later call is equal, or refused within 64 calls. A program that the
last result has is not run again, unless its text or the code has changed since; `--only` runs those whose name holds
WORD. By plans (`--kind shard`), at least 40 are equal, and the rest are refused or end in torch's own error.

`--kind bf16` compares runs under autocast to bfloat16 on one device and on ranks, each from 5 seeds. Both round, so
they may differ by twice of what one device differs from its own run without autocast, medians of the seeds. That run
is in float32, since numbers are drawn otherwise in float64. The least bound is float32's rounding, 1e-6. At least 40
programs are equal so.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from keep import RESULTS, keep

sys.path.insert(0, str(Path(__file__).parents[1]))
import meshwise as mw
from meshwise.parallel import compiled
from meshwise.spec import errors
from tests.pool import CaseFailed, Pool
from tests.training.whole.running import PROGRAMS, SWITCHES, Program, apart, run, untouched

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Kind:
    """How programs run. plan: the plan file. autocast: to bfloat16, after our line."""

    ranks: int
    plan: str = ""
    autocast: bool = False


KINDS = {
    "1": Kind(1),
    "2": Kind(2),
    "3": Kind(3),
    "shard": Kind(2, "shard = 2"),
    "zero1": Kind(2, "data = 2\nzero1 = true"),
    "recompute": Kind(2, 'data = 2\nrecompute = "full"'),
    "data x tensor": Kind(4, "data = 2\ntensor = 2"),
    "compile": Kind(2, "data = 2\ncompile = true"),
    "bf16": Kind(2, autocast=True),
}
BOUND, ROUNDED, LIMIT, SEEDS = 1e-9, 1e-6, 120.0, range(5)
FAR = 0.1
"""A bound above it says nothing: autocast makes the program draw other numbers, or branch otherwise."""
NOT_JUDGED = {
    ("wgan_with_gradient_penalty", "bf16"): "Adam makes a whole step of a bias's gradient that is zero but for rounding"
}
OURS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.MeshwiseError)
}


def code() -> str:
    """The last commit of the code and of what the programs share, with a `+` where they were changed after it."""
    places = ("--", "src", "tests/training/whole/shared.py", "tests/training/whole/running.py")

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h", *places) + "+" * bool(git("status", "--short", *places))


def in_float32(program: Program, seed: int, distribute: Any = untouched, *, autocast: bool = False) -> Any:
    """What a program leaves in float32, from our line on under autocast or not."""
    begin = torch.manual_seed
    with ExitStack() as stack:

        def begun(*things: Any) -> Any:
            made = distribute(*things)
            if autocast:  # with a cache, weights would stay those of the first step
                stack.enter_context(torch.autocast("cpu", torch.bfloat16, cache_enabled=False))
            return made

        stack.enter_context(patch.object(torch, "set_default_dtype"))
        stack.enter_context(patch.object(torch, "manual_seed", lambda _: begin(seed)))
        return run(program, begun)


def left(program: Program, kind: Kind, distribute: Any = untouched) -> list[Any]:
    """What a program leaves, from each seed if it rounds."""
    if not kind.autocast:
        return [run(program, distribute)]
    return [in_float32(program, seed, distribute, autocast=True) for seed in SEEDS]


def on_ranks(program: Program, kind: Kind) -> list[Any]:
    """What a program leaves on a rank."""
    compiled.BACKEND = "aot_eager"  # traces all, and generates no code, for which there is no time
    return left(program, kind, partial(mw.distribute, view="whole"))


def difference(got: list[Any], want: list[Any]) -> tuple[float, str]:
    """The median of the seeds' differences, and where it is."""
    return statistics.median_low(apart(*pair) for pair in zip(got, want, strict=True))


def outcome(pool: Pool, program: Program, kind: Kind) -> dict[str, Any]:
    """What a program came to on the ranks of a pool."""
    began, bound = time.perf_counter(), BOUND
    try:
        want = left(program, kind)
        if kind.autocast:
            bound = max(2 * difference(want, [in_float32(program, seed) for seed in SEEDS])[0], ROUNDED)
    except Exception as error:  # whatever a program raises that is not written for bfloat16
        return {"outcome": "does not run", "said": f"{type(error).__name__}: {error}"[:300]}
    try:
        results = pool.run(on_ranks, program, kind, timeout=LIMIT)
    except CaseFailed as failed:
        how = "refused" if failed.kind in OURS else "failed"
        found: dict[str, Any] = {"outcome": how, "said": f"{failed.kind}: {failed.text}"[:600]}
    except TimeoutError as late:
        found = {"outcome": "stuck", "said": str(late)[:2000]}
    else:
        far, at = max(difference(got, want) for got in results)
        alike = max(difference(got, results[0])[0] for got in results)
        how = "not judged" if bound > FAR else "equal" if far <= bound else "WRONG"
        found = {"outcome": how, "difference": far, "at": at, "ranks apart": alike}
    return found | {"bound": bound, "seconds": round(time.perf_counter() - began, 3)}


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
    if not KINDS[kind].plan:
        return Pool(KINDS[kind].ranks)
    file = Path(tempfile.mkdtemp()) / "plan.toml"
    file.write_text(KINDS[kind].plan + "\n")
    return Pool(KINDS[kind].ranks, MESHWISE_PLAN=str(file))


def main() -> None:
    """Run what is missing, keep each program's result at once, and say what is not equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="WORD", default="", help="programs whose name holds it")
    parser.add_argument("--kind", choices=KINDS, help="by default, 1, 2 and 3 ranks")
    parser.add_argument("--again", action="store_true", help="run all anew")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
    torch.set_num_threads(1)  # as on ranks
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
            found = done[name][kind] = {"of": of} | outcome(pool, program, KINDS[kind])
            if found["outcome"] == "WRONG" and (name, kind) in NOT_JUDGED:
                found |= {"outcome": "not judged", "said": NOT_JUDGED[name, kind]}
            if found["outcome"] != "equal":
                print(f"{name}, {kind}: {found['outcome']}, {found.get('said') or (found['difference'], found['at'])}")
            keep("whole", {"claim": f"equal to {BOUND}", "totals": told(done), "programs": done})
        pool.close()
    print(json.dumps(told(done), indent=1))


if __name__ == "__main__":
    main()
