"""Random programs over arrays against NumPy (tests/arrays/programs.py), thousands of them.

    python bench/array_programs.py [--programs 5000] [--views] [--poisoned] [--strict] [--ranks 3]

--views: programs that keep views alive and write through them (tests/arrays/alias_programs.py). --poisoned: memory that
nobody wrote has values that are noticed. --strict: on mw.virtual_devices, where what mixes devices fails. --ranks:
on the ranks of a run, all of which run each program. A failure prints its seed, which is kept: `run(seed, places)` is
the same program again, with --views `run(Random(seed), places)`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from keep import RESULTS, keep

import meshwise as mw
from tests.arrays.alias_programs import run as run_with_views
from tests.arrays.programs import run
from tests.arrays.test_over_ranks import programs_of_ranks
from tests.pool import Pool

_empty = torch.empty


def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
    """torch.empty with values that are noticed."""
    made: torch.Tensor = _empty(*args, **kwargs)  # type: ignore[call-overload]
    return made.fill_(True if made.dtype is torch.bool else 77)


def main() -> None:
    """Run, count, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--views", action="store_true")
    parser.add_argument("--poisoned", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--ranks", type=int, default=0)
    asked = parser.parse_args()
    begun, failed, counts = time.monotonic(), {}, Counter[str]()
    if asked.ranks:
        on_ranks(asked.programs, asked.ranks, asked.views)
        return
    for seed in range(asked.programs):
        places = 1 + seed % 4
        with contextlib.ExitStack() as stack:
            if asked.poisoned:
                stack.enter_context(patch.object(torch, "empty", poisoned))
            if asked.strict:
                stack.enter_context(mw.virtual_devices(places))
            try:
                counts.update(run_with_views(Random(seed), places) if asked.views else run(seed, places))
            except AssertionError as error:
                failed[seed] = str(error)[:600]
                print(failed[seed], flush=True)
    way = "poisoned" if asked.poisoned else "strict" if asked.strict else "plain"
    way = f"views, {way}" if asked.views else way
    print(f"{way}: {asked.programs - len(failed)} of {asked.programs} as NumPy, {time.monotonic() - begun:.0f} s")
    kept(way, {"programs": asked.programs, "failed": failed, "operations": dict(counts)})


def views_of_ranks(first: int, count: int) -> list[str]:
    """What differs from NumPy in so many programs with views, on this rank."""
    found = []
    for seed in range(first, first + count):
        try:
            run_with_views(Random(seed), mw.world_size(), over_ranks=True)
        except AssertionError as error:
            found.append(str(error))
    return found


def on_ranks(programs: int, ranks: int, views: bool) -> None:
    """The programs over ranks, as workers of this machine."""
    begun, pool = time.monotonic(), Pool(ranks)
    ours = views_of_ranks if views else programs_of_ranks
    failed = [pool.run(ours, first, 100, timeout=500) for first in range(0, programs, 100)]
    pool.close()
    told = sorted({one for answers in failed for own in answers for one in own})
    print("\n".join(each[:600] for each in told))
    print(f"{ranks} ranks: {programs - len(told)} of {programs} as NumPy, {time.monotonic() - begun:.0f} s")
    kept(f"views, {ranks} ranks" if views else f"{ranks} ranks", {"programs": programs, "failed": told})


def kept(way: str, result: dict[str, Any]) -> None:
    """Beside what was found in other ways."""
    path = RESULTS / "array_programs.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    before.pop("machine", None)
    keep("array_programs", before | {way: result})


if __name__ == "__main__":
    main()
