"""Run code blocks one after another, each in a namespace of its own, and write down what each did.

`test_tutorials.py` starts this file once for all blocks that need one process, and once a rank for those that need two.
Arguments: the file of blocks to read (JSON), the file of outcomes to write (one JSON line a block), those of all ranks.
"""

import contextlib
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def run(code: str, name: str) -> dict[str, object]:
    """Execute `code` as a program of its own: what it printed, what it warned of, and what it raised, if anything."""
    printed, error = io.StringIO(), ""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    return {
        "printed": printed.getvalue(),
        "warned": [f"{entry.category.__name__}: {entry.message}" for entry in caught],
        "error": error,
    }


def begin_together(*arguments: Any, _begin: Callable[..., None] = dist.init_process_group, **named: Any) -> None:
    """Return from `init_process_group` when every rank has: a rank that left its group at once failed the others'."""
    _begin(*arguments, **named)
    dist.barrier()


def wait_for(count: int, outcomes: list[Path], seconds: float = 60.0) -> None:
    """Return when each rank has written `count` outcomes: a group that one rank left early fails on another."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if all(file.exists() and file.read_text(encoding="utf-8").count("\n") >= count for file in outcomes):
            return
        time.sleep(0.01)


def main(blocks: Path, own: Path, everyone: list[Path]) -> None:
    """Run all blocks; a line is on disk before the next block starts, so that a crash loses one outcome only."""
    dist.init_process_group = begin_together
    with own.open("w", encoding="utf-8") as lines:
        for count, block in enumerate(json.loads(blocks.read_text(encoding="utf-8")), 1):
            os.environ["MASTER_PORT"] = str(block["port"])
            print(json.dumps({"name": block["name"], **run(block["code"], block["name"])}), file=lines, flush=True)
            if dist.is_initialized():  # a block that failed half-way must not leave its group to the next one
                wait_for(count, everyone)
                dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(file) for file in sys.argv[3:]])
