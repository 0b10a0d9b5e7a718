"""Random programs over arrays against NumPy (tests/arrays/programs.py), thousands of them.

    python bench/array_programs.py [--programs 5000] [--poisoned] [--strict]

--poisoned: memory that nobody wrote has values that are noticed. --strict: on mw.virtual_devices, where what mixes
devices is an error. A failure prints its seed, which is kept: `run(seed, places)` is the same program again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from keep import RESULTS, keep

import meshwise as mw
from tests.arrays.programs import run

_empty = torch.empty


def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
    """torch.empty with values that are noticed."""
    made: torch.Tensor = _empty(*args, **kwargs)  # type: ignore[call-overload]
    return made.fill_(True if made.dtype is torch.bool else 77)


def main() -> None:
    """Run, count, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--poisoned", action="store_true")
    parser.add_argument("--strict", action="store_true")
    asked = parser.parse_args()
    begun, failed, counts = time.monotonic(), {}, Counter[str]()
    for seed in range(asked.programs):
        places = 1 + seed % 4
        with contextlib.ExitStack() as stack:
            if asked.poisoned:
                stack.enter_context(patch.object(torch, "empty", poisoned))
            if asked.strict:
                stack.enter_context(mw.virtual_devices(places))
            try:
                counts.update(run(seed, places))
            except AssertionError as error:
                failed[seed] = str(error)[:600]
                print(failed[seed], flush=True)
    way = "poisoned" if asked.poisoned else "strict" if asked.strict else "plain"
    print(f"{way}: {asked.programs - len(failed)} of {asked.programs} as NumPy, {time.monotonic() - begun:.0f} s")
    path = RESULTS / "array_programs.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    before.pop("machine", None)
    keep("array_programs", before | {way: {"programs": asked.programs, "failed": failed, "operations": dict(counts)}})


if __name__ == "__main__":
    main()
