"""`enumerate(loader)` in a loop that goes on inside an epoch: its numbers begin at 0 again, which is said.

Tested in tests/training/test_distributed_loader.py.
"""

from __future__ import annotations

import linecache
import re

from meshwise.spec.user_code import place, user_frame

_CALL = re.compile(r"\benumerate\(([^(),=]+)\)")
"""Of one argument that is a name, so without a start."""


def says_enumerate(start: int) -> str:
    """What to say of the user's line that begins to loop over a loader behind `start` batches; empty where that line
    does not count its batches from 0."""
    frame = user_frame()
    if frame is None or not start:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    found = _CALL.search(linecache.getline(file, line, frame.f_globals).partition("#")[0])
    if found is None:
        return ""
    name = found[1].strip()
    return (
        f"{place(file, line)}: the loop goes on with batch {start + 1} of its epoch, and enumerate counts from 0. "
        f"Where that number decides anything (accumulation, a break), write enumerate({name}, {name}.start)."
    )
