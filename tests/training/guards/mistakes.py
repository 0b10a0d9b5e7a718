"""Judges the scripts of tests/programs/mistakes, each with a mistake, and its right twin.

Lines that end with `# wrong` are the mistake; what is right stands in comments, `# right: …`, in their place. Each runs
on one CPU worker and on two; what it prints is compared. A mistake is `right` where two print what one prints (with
--exact-random, where the run says that masks are drawn apart), `refused` where the run on two ends with a sentence,
`said` where two are told a line of the script that one is not, `check` where only `meshwise check` names it; else it is
silent. `raw` is a traceback of two alone without a remedy or a crash, `stuck` more than 150 s. A twin is clean where it
runs, prints the same, and is told nothing of its lines; that a loss is not finite is a fact of its data, and no alarm.
Where a docstring names a plan, `(--set shard=2)`, two run under it. `# After` is the thread of somebody who met it.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "programs" / "mistakes"
SOURCE = Path(__file__).parents[3] / "src"
RIGHT = re.compile(r"(\s*)# right: ?")
NUMBER = re.compile(r"-?(?:\d+\.\d*(?:e[+-]?\d+)?|\d+|nan|inf)\b", re.IGNORECASE)
OURS = re.compile(  # lines of the run itself: its beginning, its findings, its records
    r"starting |records |more with |weights |Attempt |\w+-bound[: ]|Rank \d+ is|Load imbalance|Between phases"
    r"|\d+ devices are slower|try |step \d+: the loss |\d+ of \d+ losses were not"
    r"|shard: a rank may skip |tensor=\d+: \d+% of "
)
EXACT, DRAWS = "--exact-random", "each rank draws its own masks"
STUCK = 124  # the exit code of a script that does not end
PLAN = re.compile(r"\((--set \w+=\w+)\)")  # in the docstring of a script
IMPORTS = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

"""
ROWS = "torch.manual_seed(0)\nX = torch.randn(96, 4)\nY = X.sum(1, keepdim=True)\n"
USUAL = {"# usual imports and rows\n": IMPORTS + ROWS, "# usual imports\n": IMPORTS}
"""What stands for the beginning of most scripts."""
CLOSE = 1e-5  # of float32 sums in another order, over a few steps


@dataclass(frozen=True)
class Ran:
    """A run of a script: its exit code, the numbers that it printed, the lines that name a line of it, all it said."""

    code: int
    numbers: list[float]
    told: list[str]
    text: str

    @property
    def last(self) -> str:
        lines = [line for line in self.text.splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line or ":" in line), "")[:300]


def sides(script: Path, folder: Path) -> tuple[Path, Path]:
    """Write the mistake and its right twin into a folder."""
    text = script.read_text(encoding="utf-8")
    for word, stands_for in USUAL.items():
        text = text.replace(word, stands_for)
    lines = text.splitlines()
    wrong = [line.removesuffix("  # wrong") for line in lines if not RIGHT.match(line)]
    right = [RIGHT.sub(r"\1", line) for line in lines if not line.endswith("  # wrong")]
    paths = folder / script.name, folder / f"{script.stem}_right.py"
    for path, text in zip(paths, (wrong, right), strict=True):
        path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return paths


def run(path: Path, devices: int, *options: str) -> Ran:
    """Under `meshwise run`, in a folder of its own."""
    plan = PLAN.search(path.read_text()) if devices > 1 else None
    return _ran(path, "run", "--devices", f"{devices}xcpu", *(plan[1].split() if plan else ()), *options)


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


def of_mistake(path: Path) -> tuple[str, str]:
    """What becomes of a mistake, and what was said."""
    one, two = run(path, 1), run(path, 2)
    if STUCK in (one.code, two.code):
        return "stuck", ""
    if "was killed by SIG" in two.text:
        return "raw", two.last
    if two.code:
        sentence = "Traceback" not in two.text.replace("Traceback of rank", "") or _remedied(two) or one.code
        return "refused" if sentence else "raw", two.last
    if two.told:
        return "said", next((line for line in two.told if line not in one.told), two.told[0])
    if same(one, two) or (DRAWS in two.text and same(run(path, 1, EXACT), run(path, 2, EXACT))):
        return "right", ""
    found = _ran(path, "check", "--set", "data=2")
    named = found.code in (1, 4) or re.search(rf"{path.stem}\.py:\d+:", found.text)  # 4: not judged in all
    return "check" if named else "silent", found.text[:300]


def of_twin(path: Path) -> tuple[str, str]:
    """Whether the right form is let alone, and what was said."""
    one, two = run(path, 1), run(path, 2)
    for side in (two, one):
        if side.code:
            return "refused", side.last
        if side.told:
            return "alarm", side.told[0]
    if not same(one, two):
        return "differs", f"{one.numbers[:8]} and {two.numbers[:8]}"
    return "clean", ""


def _remedied(ran: Ran) -> bool:
    """Whether a sentence of the run follows the program's own error: what to write instead."""
    after = re.split(r"^(?:all \d+ ranks|rank \d+ of \d+) failed: .*\n", ran.text, flags=re.MULTILINE)
    return len(after) > 1 and after[-1].strip().endswith(".")
