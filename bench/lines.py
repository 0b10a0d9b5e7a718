"""How many code lines of the package are lines of an older commit, and how many are younger.

    python bench/lines.py [--since 9d7d689]

By `git blame -w -M -C`, so that moved lines keep their age; a line with another word is young. Code lines are counted
as tests/test_floors.py counts them. The result, with the commits that brought most: bench/results/lines.json.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from keep import keep

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from tests.test_floors import Source, numbers_of_code  # noqa: E402

HEADER = re.compile(r"^(\^?[0-9a-f]{40}) \d+ (\d+)")


def blamed(path: Path, since: str) -> dict[int, str]:
    """Return the commit of each line of a file; lines of `since` and before have none."""
    words = ["git", "blame", "-w", "-M", "-C", "--porcelain", f"{since}..HEAD", "--", str(path.relative_to(ROOT))]
    text = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines, boundary = dict[int, str](), set[str]()
    commit = ""
    for line in text.splitlines():
        if found := HEADER.match(line):
            commit = found[1]
            lines[int(found[2])] = commit
        elif line == "boundary":
            boundary.add(commit)
    return {number: "" if commit in boundary else commit for number, commit in lines.items()}


def main() -> None:
    """Count, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="9d7d689")
    given = parser.parse_args()
    commits: Counter[str] = Counter()
    for path in sorted((ROOT / "src" / "meshwise").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        ages = blamed(path, given.since)
        commits.update(ages[number] for number in numbers_of_code(Source(path.name, text, ast.parse(text))))
    old = commits.pop("", 0)
    named = {
        subprocess.run(
            ["git", "log", "-1", "--format=%h %s", commit], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(): lines
        for commit, lines in commits.most_common(60)
    }
    result = {"lines": old + commits.total(), f"lines of {given.since}": old, "younger": commits.total()}
    print(result)
    keep("lines", result | {"commits that brought most": named})


if __name__ == "__main__":
    main()
