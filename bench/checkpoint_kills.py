"""A save that is killed at any line, on any rank, and every kind of damage to every file: what is there afterwards.

    python bench/checkpoint_kills.py               every line of the protocol, 1 to 3 ranks (minutes)
    python bench/checkpoint_kills.py --stride 10   every tenth

One rank of a save is killed (SIGKILL) before it comes to a line of the protocol: making the folder, opening, writing,
syncing its file, telling the others, the manifest, the rename, the removal of older ones. Then the others are. A line
makes at most one system call that changes the disk. Damage: bits, holes of zeros, cuts, missing files, files of
another rank, of an older checkpoint, or of both.

Claim: what is found is the older state or the newer one, each whole, never a mixture and never nothing; every damage is
noticed, and the state before it is taken.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from keep import keep

sys.path.insert(0, str(Path(__file__).parents[1]))

from meshwise.training.recovery import writing
from tests.training.recovery.dying_writers import begun, found, harms, saved_by


def killed(ranks: int, victim: int, stride: int) -> dict[str, Any]:
    """How often which state was found after a kill, over the lines of the protocol on this rank."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        begun(folder, ranks)
        lines = saved_by(ranks, folder, 2)[victim]
        points = [*range(1, lines + 1, stride)]
        for at in points:
            begun(folder, ranks)
            saved_by(ranks, folder, 2, victim, at)
            counts[_after(folder)] += 1
    held = set(counts) <= {"older", "newer"}
    return {"ranks": ranks, "victim": victim, "lines": lines, "points": len(points), **counts, "held": held}


def _after(folder: Path) -> str:
    try:
        return {1: "older", 2: "newer", None: "none"}[found(folder)]
    except AssertionError:
        return "mixture"


def damaged(ranks: int) -> list[dict[str, Any]]:
    """Each damage to the newer of two checkpoints, and what was found then."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        kept, folder = Path(name) / "kept", Path(name) / "run"
        for step in (1, 2):
            saved_by(ranks, kept, step, keep=2)
        for harm in harms(kept):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(kept, folder)
            harms(folder)[harm]()
            rows.append({"ranks": ranks, "damage": harm, "found": _after(folder)})
    return rows


def main() -> None:
    """Kill, damage, look, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stride", type=int, default=1, help="lines from one kill to the next")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3])
    given = parser.parse_args()
    writing.POLL = 0.0002
    kills = []
    for ranks in given.ranks:
        for victim in range(ranks):
            kills.append(row := killed(ranks, victim, given.stride))
            states = ", ".join(
                f"{row[state]} {state}" for state in ("older", "newer", "none", "mixture") if state in row
            )
            print(
                f"{ranks} ranks, rank {victim} killed at {row['points']} of {row['lines']} lines: {states}", flush=True
            )
    rows = [row for ranks in given.ranks for row in damaged(ranks)]
    noticed = [row for row in rows if row["found"] == "older"]
    print(f"damage noticed, and the older state taken: {len(noticed)} of {len(rows)}")
    missed = [row for row in rows if row not in noticed]
    for row in missed:
        print(f"  not: {row}")
    kinds = Counter(row["damage"].partition(":")[0] for row in rows)
    claim = " ".join((__doc__ or "").partition("Claim: ")[2].split())
    held = not missed and all(row["held"] for row in kills)
    damage = {"tried": len(rows), "noticed": len(noticed), "missed": missed, "kinds": kinds}
    keep("checkpoint_kills", {"claim": claim, "held": held, "stride": given.stride, "kills": kills, "damage": damage})


if __name__ == "__main__":
    main()
