"""Records what of meshwise a process calls. Python imports this file at its start if the folder is on its path.

A function is entered when it is called, or resumed as a generator; what runs while a module is imported does not count.
A step is what the main thread does from the end of one `optimizer.step`, with its hooks, to the end of the next. Of
each step: calls of our functions, calls of Python's own library that ours make (directly or through it), and the
functions with the lines that have code. Of the time before the first step: the functions of every thread.
`bench/path.py` starts processes with this folder on PYTHONPATH; they write into $PATH_RESULTS when $PATH_STEPS steps
are done, and the run is stopped.
"""

import json
import os
import signal
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

RESULTS = Path(os.environ["PATH_RESULTS"])
STEPS = int(os.environ.get("PATH_STEPS", "40"))
SOURCE = f"src{os.sep}meshwise{os.sep}"
LIBRARY, SITE = sysconfig.get_paths()["stdlib"] + os.sep, f"{os.sep}site-packages{os.sep}"
OPTIMIZER = os.path.join("torch", "optim", "optimizer.py")  # noqa: PTH118  no Path for each call of a trace
STEP = "Optimizer.profile_hook_step.<locals>.wrapper"

first_entered: dict[str, dict[str, float]] = {}
"""File -> function -> when it was called first, in seconds since 1970."""
kinds: dict[CodeType, str] = {}
"""Whose code it is: a file of ours, `library`, or nothing."""
window: dict[CodeType, int] = {}
"""How often each of our functions was called since the last step, in the order of the first calls."""
library: list[str] = []
"""Calls of Python's library for ours since the last step."""
steps: list[dict[str, Any]] = []
first_step: list[float] = []
main = threading.main_thread()
importing = threading.local()


def kind(code: CodeType) -> str:
    """The path inside the package, `library`, or nothing."""
    known = kinds.get(code)
    if known is None:
        name = code.co_filename
        at = name.rfind(SOURCE)
        ours = name[at + len(SOURCE) :] if at >= 0 else ""
        kinds[code] = known = ours or ("library" if is_library(name) else "")
    return known


def is_library(name: str) -> bool:
    """Whether a file is of Python's own library; what it makes up, such as `<string>` of dataclasses, is."""
    return (name.startswith(LIBRARY) and SITE not in name) or name.startswith(("<frozen", "<string>"))


def for_ours(frame: FrameType | None) -> bool:
    """Whether a call of the library is made by ours, directly or through the library."""
    while frame is not None:
        whose = kind(frame.f_code)
        if whose != "library":
            return bool(whose)
        frame = frame.f_back
    return False


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
        whose = kind(code)
        if whose == "library":
            if threading.current_thread() is main and for_ours(frame.f_back):
                library.append(code.co_qualname)
        elif whose:
            first_entered.setdefault(whose, {}).setdefault(code.co_qualname, time.time())
            if threading.current_thread() is main:
                window[code] = window.get(code, 0) + 1
    elif code.co_qualname == STEP and code.co_filename.endswith(OPTIMIZER):
        step_ended()


def step_ended() -> None:
    """Keep the step, and write all after the last one."""
    first_step.append(time.time())
    functions = [[kinds[code], code.co_qualname, times, lines(code)] for code, times in window.items()]
    steps.append({"functions": functions, "library": library.copy()})
    window.clear()
    library.clear()
    if len(steps) == STEPS:
        write()
        sys.setprofile(None)
        os.kill(os.getppid(), signal.SIGINT)


def lines(code: CodeType) -> int:
    """How many lines of a function have code."""
    return len({line for _, _, line in code.co_lines() if line is not None})


def write() -> None:
    """Write what was seen so far."""
    facts = {"entered": first_entered, "steps": steps, "first step": first_step[:1]}
    (RESULTS / f"{os.getpid()}.json").write_text(json.dumps(facts))


class FromTheEngineOn:
    """Watches once the engine is imported: the imports before it take long where they are watched."""

    def find_spec(self, name: str, *_: object) -> None:
        """Find nothing."""
        if name == "meshwise.training.engine.engine":
            begin()


def begin() -> None:
    """Watch every thread from now on."""
    threading.setprofile(watch)
    sys.setprofile(watch)


import atexit  # noqa: E402

atexit.register(lambda: None if len(steps) >= STEPS else write())
if os.environ.get("PATH_FROM_THE_ENGINE_ON"):
    sys.meta_path.insert(0, FromTheEngineOn())  # type: ignore[arg-type]
else:
    begin()
