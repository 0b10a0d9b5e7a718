"""Mistakes that people make in scripts, each beside a right twin: nothing is silently wrong, no twin is alarmed.

    python bench/mistakes.py [--only WORD] [--again]

bench/mistakes has NAME.py with a mistake and NAME_right.py without it. Each runs on one CPU worker and on two; what it
prints is compared. A mistake is `right` where two print what one prints (with --exact-random, where the run says that
masks are drawn apart), `refused` where the run on two ends with a sentence, `said` where two are told a line of the
script that one is not, `check` where only `meshwise check` names it; else it is silent. `raw` is a traceback of two
alone without a remedy or a crash, `stuck` more than 150 s. A twin is clean where it runs, prints the same, and is told
nothing of its lines; that a loss is not finite is a fact of its data, and no alarm. Where a docstring names a plan,
`(--set shard=2)`, two run under it. `# After` is the thread of somebody who met it. Results are kept as they come.

Claim: of 60 mistakes at least 54 are right, refused or said in `run`, none is silent; 60 twins are clean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keep import RESULTS, keep

HERE = Path(__file__).parent / "mistakes"
SOURCE = Path(__file__).parents[1] / "src"
NUMBER = re.compile(r"-?(?:\d+\.\d*(?:e[+-]?\d+)?|\d+|nan|inf)\b", re.IGNORECASE)
OURS = re.compile(  # lines of the run itself: its beginning, its findings, its records
    r"starting |records |more with |weights |Attempt |\w+-bound[: ]|Rank \d+ is|Load imbalance|Between phases"
    r"|\d+ devices are slower|try |step \d+: the loss |\d+ of \d+ losses were not"
    r"|shard: a rank may skip |tensor=\d+: \d+% of "
)
EXACT, DRAWS = "--exact-random", "each rank draws its own masks"
STUCK = 124  # the exit code of a script that does not end
PLAN = re.compile(r"\((--set \w+=\w+)\)")  # in the docstring of a script
CLOSE = 1e-5  # of float32 sums in another order, over a few steps


@dataclass(frozen=True)
class Ran:
    """A run of a script: its exit code, the numbers that it printed, the lines that name a line of it, all it said."""

    code: int
    numbers: list[float]
    told: list[str]
    text: str


def run(path: Path, devices: int, *options: str) -> Ran:
    """Under `meshwise run`, in a folder of its own."""
    plan = PLAN.search(path.read_text()) if devices > 1 else None
    return _ran(path, "run", "--devices", f"{devices}xcpu", *(plan[1].split() if plan else ()), *options)


def check(path: Path) -> Ran:
    """Under `meshwise check` on two."""
    return _ran(path, "check", "--set", "data=2")


def _ran(path: Path, *command: str) -> Ran:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "meshwise", *command, str(path)]
        try:
            done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)
        except subprocess.TimeoutExpired as error:
            return Ran(STUCK, [], [], f"did not end: {error.stdout!r}")
    lines = (done.stdout + done.stderr).replace(f"{path.parent}{os.sep}", "").splitlines()
    told = [line for line in lines if re.match(rf"\S*{path.name}:\d+:", line) or (path.name in line and "line" in line)]
    printed = [
        line
        for line in done.stdout.replace(f"{path.parent}{os.sep}", "").splitlines()
        if not OURS.match(line) and not line.startswith(path.name) and line not in told
    ]
    numbers = [float(word) for line in printed for word in NUMBER.findall(line)]
    return Ran(done.returncode, numbers, told, "\n".join(lines))


def same(one: Ran, two: Ran) -> bool:
    """Whether both printed the same numbers."""
    if len(one.numbers) != len(two.numbers):
        return False
    return all(
        a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= CLOSE * max(1.0, abs(a))
        for a, b in zip(one.numbers, two.numbers, strict=True)
    )


def of_mistake(path: Path) -> dict[str, Any]:
    """What becomes of a mistake."""
    one, two = run(path, 1), run(path, 2)
    if STUCK in (one.code, two.code):
        return {"verdict": "stuck", "said": ""}
    new = [line for line in two.told if line not in one.told]
    if "was killed by SIG" in two.text:
        return {"verdict": "raw", "said": _last(two)}
    if two.code and ("Traceback" not in two.text.replace("Traceback of rank", "") or _remedied(two)):
        return {"verdict": "refused", "said": _last(two)}
    if two.code and one.code:
        return {"verdict": "refused", "said": _last(two)}
    if two.code:
        return {"verdict": "raw", "said": _last(two)}
    if new or two.told:
        return {"verdict": "said", "said": (new or two.told)[0][:300]}
    if same(one, two):
        return {"verdict": "right", "said": ""}
    if DRAWS in two.text and same(run(path, 1, EXACT), run(path, 2, EXACT)):
        return {"verdict": "right", "said": f"with {EXACT}; the run says that each rank draws its own masks"}
    found = check(path)
    return {"verdict": "check" if found.code == 1 else "silent", "said": found.text[:300]}


def of_twin(path: Path) -> dict[str, Any]:
    """Whether the right form is let alone."""
    one, two = run(path, 1), run(path, 2)
    if two.code or one.code:
        return {"verdict": "refused", "said": _last(two if two.code else one)}
    if two.told or one.told:
        return {"verdict": "alarm", "said": (two.told or one.told)[0][:300]}
    if not same(one, two):
        return {"verdict": "differs", "said": f"{one.numbers[:8]} and {two.numbers[:8]}"}
    return {"verdict": "clean", "said": ""}


def _remedied(ran: Ran) -> bool:
    """Whether a sentence of the run follows the program's own error: what to write instead."""
    after = re.split(r"^(?:all \d+ ranks|rank \d+ of \d+) failed: .*\n", ran.text, flags=re.MULTILINE)
    return len(after) > 1 and after[-1].strip().endswith(".")


def _last(ran: Ran) -> str:
    lines = [line for line in ran.text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line or ":" in line), "")[:300]


def _tried(scripts: list[Path], at_once: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    with ThreadPoolExecutor(at_once) as pool:
        tries = {
            pool.submit(of_twin if script.stem.endswith("_right") else of_mistake, script): script for script in scripts
        }
        for tried in as_completed(tries):
            yield tries[tried], tried.result()


def main() -> None:
    """Try what the last result lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="scripts with this in their names")
    parser.add_argument("--again", action="store_true", help="those that have a result, too")
    parser.add_argument("--at-once", type=int, default=1, help="scripts at a time (1)")
    asked = parser.parse_args()
    path = RESULTS / "mistakes.json"
    kept: dict[str, Any] = json.loads(path.read_text())["scripts"] if path.exists() else {}
    scripts = [
        script
        for script in sorted(HERE.glob("*.py"))
        if asked.only in script.name and (asked.again or script.stem not in kept)
    ]
    for script, found in _tried(scripts, asked.at_once):
        kept[script.stem] = found
        print(f"{script.stem:40} {kept[script.stem]['verdict']:8} {kept[script.stem]['said'][:160]}", flush=True)
        there = {script.stem for script in HERE.glob("*.py")}
        kept = {name: found for name, found in sorted(kept.items()) if name in there}
        sides = {side: Counter(f["verdict"] for n, f in kept.items() if n.endswith("_right") is (side == "twins"))
                 for side in ("mistakes", "twins")}  # fmt: skip
        keep("mistakes", {"counts": {side: dict(counted) for side, counted in sides.items()}, "scripts": kept})


if __name__ == "__main__":
    main()
