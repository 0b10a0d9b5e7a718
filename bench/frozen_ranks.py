"""A rank of attempt 1 that stands still at any line, and wakes while attempt 2 runs: what it changes.

    python bench/frozen_ranks.py               every line (minutes)
    python bench/frozen_ranks.py --stride 5    every fifth

Attempt 1 stands still (SIGSTOP) before a line of what it writes: a state and the removal of an old one, a line of
metrics.jsonl, run.json, the weights; and as another rank, its part of a state. Attempt 2 begins in the same folder,
notes which states and how many bytes of metrics.jsonl count, saves, logs, writes weights and record. The first one
wakes and does what it was about to. Then the second one works once more, and ends.

Claim: what the first one does once it has woken changes no byte of what anyone reads, neither of the states and lines
that counted nor of attempt 2, and it ends with a sentence.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keep import keep

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.training.recovery.frozen_writers import KINDS, lines_of, woken


def rows(stride: int) -> Iterator[dict[str, Any]]:
    """For each thing that is written: the lines before which it stood still, and what was changed then."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            lines, wrong = lines_of(folder / "lines", kind), {}
            points = range(1, lines - 1, stride)  # the last two may not come: threads end in another order
            for at in points:
                if found := woken(folder / "run", kind, at):
                    wrong[at] = found
                for path in folder.glob("run*"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        print(f"{kind}: stood still before {len(points)} of {lines} lines, changed something {len(wrong)} times")
        for at, found in wrong.items():
            print(f"  line {at}: {'; '.join(found)[:300]}")
        yield {"what": kind, "lines": lines, "points": len(points), "wrong": wrong}


def main() -> None:
    """Stand still, wake, compare, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stride", type=int, default=1, help="lines from one point to the next")
    given = parser.parse_args()
    found = list(rows(given.stride))
    points = sum(row["points"] for row in found)
    print(f"{points} points, of which {sum(len(row['wrong']) for row in found)} changed something")
    claim = " ".join((__doc__ or "").partition("Claim: ")[2].split())
    held = not any(row["wrong"] for row in found)
    keep("frozen_ranks", {"claim": claim, "held": held, "stride": given.stride, "points": points, "rows": found})


if __name__ == "__main__":
    main()
