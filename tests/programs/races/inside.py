"""Run one program of bench/races.py in this process: `inside.py MODE FILE.py:FUNCTION`.

plain: as it is; at the end, what lives on the devices is said. checker: under meshwise's, and after the program a fault
that it must find. sanitizer: under torch's own. What was found goes to stderr, a line of JSON each.
"""

from __future__ import annotations

import gc
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.cuda._sanitizer


def say(kind: str, **facts: Any) -> None:
    """A line for bench/races.py."""
    print(f"@{kind} {json.dumps(facts)}", file=sys.stderr, flush=True)


def planted() -> None:
    """What a checker that is on must find."""
    here, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        here.mul_(2)
    torch.cuda.synchronize()


def checked(path: str, function: str) -> None:
    """Under our checker."""
    from meshwise.checker.races.watch import find_races

    with find_races() as found:
        try:
            runpy.run_path(path)[function]()
        finally:
            for finding in found:
                say("race", sentence=finding.sentence, text=finding.text)
            before = len(found)
            planted()
            say("planted", found=len(found) > before)


def main() -> None:
    """Run it."""
    mode, (path, function) = sys.argv[1], sys.argv[2].rsplit(":", 1)
    sys.path.insert(0, str(Path(path).parent))
    if mode == "checker":
        checked(path, function)
        return
    if mode == "sanitizer":
        torch.cuda._sanitizer.enable_cuda_sanitizer()
    runpy.run_path(path)[function]()
    if mode == "plain":
        import fake_cuda

        gc.collect()
        torch.cuda.synchronize()
        say("left", **fake_cuda.counts())


if __name__ == "__main__":
    main()
