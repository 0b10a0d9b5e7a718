"""All tests, the slow ones too, in parts that are kept as they come: a suite that was cut off goes on.

    python bench/suite.py                       # make suite: every part that is not green at this commit
    python bench/suite.py --since REVISION      # nor at a commit from REVISION on
    python bench/suite.py --minutes 60          # begin no part after an hour
    python bench/suite.py --only equivalence    # parts whose name has this word
    python bench/suite.py --behind "nice -n 19" # what the tests are started with

A part is what is slow in one test file, or what is not slow in one folder, with 400 examples of hypothesis. What is
short by the last result comes first. Of a part that failed at such a commit, only the tests that failed run again. The
checkout must be clean: a result is of its commit.

Claim: every part is green at a named commit.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keep import RESULTS, keep

ROOT = Path(__file__).parents[1]
RESULT = RESULTS / "suite.json"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
ALONE = ("tests/examples/test_journey.py, slow",)  # parts whose tests measure how fast ranks are: one at a time
UNSLOW = ("-m", "not slow", "--dist", "loadfile")


def said(*words: str) -> str:
    """What a command in the checkout printed."""
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def parts() -> dict[str, tuple[str, ...]]:
    """Name of each part, and what pytest gets for it. Raises SystemExit where the tests cannot be collected."""
    words = (*PYTEST, "--collect-only", "-m", "slow", "tests")
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    slow = sorted({line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line})
    if not slow:
        raise SystemExit(f"cannot collect the tests: {(listed.stdout + listed.stderr)[-500:]}")
    folders = sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.rglob("test_*.py")))
    quick = {str(folder.relative_to(ROOT)): (str(folder), *UNSLOW) for folder in folders}
    quick["tests/*.py"] = (*map(str, sorted((ROOT / "tests").glob("test_*.py"))), *UNSLOW)
    return quick | {f"{file}, slow": (file, "-m", "slow") for file in slow}


def tested(options: Sequence[str], behind: list[str], workers: str) -> dict[str, Any]:
    """Run one part."""
    began = time.monotonic()
    words = (*behind, *PYTEST, "-n", workers, "--hypothesis-profile=suite", *options)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    last = ((done.stdout or done.stderr).strip().splitlines() or [""])[-1].strip("= ")
    return {
        "green": done.returncode in (0, 5),  # 5: nothing to run on this machine
        "tests": re.sub(r" in [\d.]+s.*", "", last),
        "failed": re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE),
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    """Run what is not green, and say what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="HEAD", metavar="REVISION")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--behind", default="", metavar="COMMAND")
    parser.add_argument("--workers", default="2", help="of pytest")
    given = parser.parse_args()
    if said("git", "status", "--porcelain", "--", "src", "tests"):
        raise SystemExit("src/ or tests/ differ from the commit: commit first, a result is of one commit")
    commit = said("git", "rev-parse", "--short=8", "HEAD")
    since = said("git", "rev-parse", "--short=8", given.since)
    recent = {commit, since, *said("git", "rev-list", "--abbrev-commit", "--abbrev=8", f"{since}..HEAD").split()}
    found: dict[str, Any] = json.loads(RESULT.read_text())["parts"] if RESULT.exists() else {}
    all_parts = parts()
    end = time.monotonic() + 60 * given.minutes
    left = [name for name in all_parts if not (found.get(name, {}).get("green") and found[name]["commit"] in recent)]
    for name in sorted(left, key=lambda name: found.get(name, {}).get("seconds", 0)):
        if given.only in name and time.monotonic() < end:
            before = found.get(name, {})
            again = before.get("failed", []) if before.get("commit") in recent else []
            found[name] = {"commit": commit} | tested(
                again or all_parts[name], given.behind.split(), "0" if name in ALONE else given.workers
            )
            if again:
                found[name]["green"] &= "passed" in found[name]["tests"]  # not where such tests are no longer
                found[name]["tests"] = f"{before['tests']} at {before['commit']}, again: {found[name]['tests']}"
                found[name]["seconds"] += before["seconds"]
            kept = {part: found[part] for part in all_parts if part in found}
            keep("suite", {"seconds": sum(one["seconds"] for one in kept.values()), "parts": kept})
            print(f"{name}: {found[name]['tests']}, {found[name]['seconds']} s", flush=True)
    not_green = [name for name in all_parts if not found.get(name, {}).get("green")]
    text = f"{len(all_parts) - len(not_green)} of {len(all_parts)} parts are green" + "; not yet:" * bool(not_green)
    print("\n  ".join([text, *not_green]))
    sys.exit(bool(not_green))


if __name__ == "__main__":
    main()
