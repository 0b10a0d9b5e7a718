"""Records which files of meshwise a process enters. Python imports this file at its start if the folder is on its path.

A file is entered when one of its functions is called; what runs while a module is imported does not count. Every thread
counts. `bench/path.py` starts processes with this folder on PYTHONPATH and reads what they write into $PATH_RESULTS.

The window of a step begins with the outermost call that leads to the read of its batch, and ends when `optimizer.step`
returns, with its hooks. The read is found by the name of the function that reads (`$PATH_READ`, as FILE:FUNCTION);
without one, the window is everything since the optimizer step before it. After $PATH_STEPS steps the run is stopped.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

RESULTS = Path(os.environ["PATH_RESULTS"])
READ = os.environ.get("PATH_READ", "")
STEPS = int(os.environ.get("PATH_STEPS", "40"))
SOURCE = f"{os.sep}meshwise{os.sep}"
OPTIMIZER = os.path.join("torch", "optim", "optimizer.py")  # noqa: PTH118  no Path for each call of a trace
STEP = "Optimizer.profile_hook_step.<locals>.wrapper"

first_entered: dict[str, dict[str, float]] = {}
"""File -> function -> when it was called first, in seconds since 1970."""
entered: list[tuple[str, FrameType, str]] = []
"""Since the last optimizer step: file, frame, function."""
steps: list[dict[str, list[str]]] = []
"""For each step, its files in the order in which they were entered, with the functions that were called."""
reads: list[int] = []
"""Where in `entered` the windows of the reads since the last step begin."""
first_step: list[float] = []
importing = threading.local()


def own_file(filename: str) -> str:
    """The path inside the package, or nothing for a file that is none of it."""
    at = filename.rfind(SOURCE)
    return filename[at + len(SOURCE) :] if at >= 0 and f"src{SOURCE}" in filename else ""


def watch(frame: FrameType, event: str, _argument: Any) -> None:
    """The profile function of every thread."""
    if event not in ("call", "return"):
        return
    code = frame.f_code
    if code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
        depth = getattr(importing, "depth", 0) + (1 if event == "call" else -1)
        importing.depth = max(depth, 0)  # this file was entered before it watched
    if getattr(importing, "depth", 0) > 0:
        return
    if event == "call":
        file = own_file(code.co_filename)
        if file:
            first_entered.setdefault(file, {}).setdefault(code.co_qualname, time.time())
            entered.append((file, frame, code.co_qualname))
            if READ and f"{file}:{code.co_qualname}" == READ:
                reads.append(outermost(frame))
    elif code.co_qualname == STEP and code.co_filename.endswith(OPTIMIZER):
        step_ended()


def outermost(frame: FrameType | None) -> int:
    """Where in `entered` the first call lies that is still under way in `frame`."""
    under_way = set()
    while frame is not None:
        under_way.add(frame)
        frame = frame.f_back
    return next(at for at, (_, called, _) in enumerate(entered) if called in under_way)


def step_ended() -> None:
    """Keep the window of the step, and write all after the last one."""
    first_step.append(time.time())
    window: dict[str, list[str]] = {}
    for file, _, function in entered[reads[0] if reads else 0 :]:
        functions = window.setdefault(file, [])
        if function not in functions:
            functions.append(function)
    steps.append(window)
    entered.clear()
    reads.clear()
    if len(steps) == STEPS:
        write()
        sys.setprofile(None)
        os.kill(os.getppid(), signal.SIGINT)


def write() -> None:
    """Write what was seen so far."""
    facts = {"arguments": sys.orig_argv, "entered": first_entered, "steps": steps, "first step": first_step[:1]}
    (RESULTS / f"{os.getpid()}.json").write_text(json.dumps(facts))


import atexit  # noqa: E402

atexit.register(lambda: None if len(steps) >= STEPS else write())
threading.setprofile(watch)
sys.setprofile(watch)
