"""Read failures of torch's loader workers from the errors of a rank.

If a loader worker was killed, the program is not to blame. If its code raised, it sends its traceback as text, with the
error at the end, after torch's frames. Read in torch 2.11, 2.13 and 2.15: `_utils.py` (ExceptionWrapper),
`utils/data/dataloader.py` and `csrc/DataLoader.cpp`. Tested in tests/workers/test_loader_failure.py.
"""

from __future__ import annotations

import re
import signal
import time
import traceback
from dataclasses import dataclass

from meshwise.spec.user_code import is_users
from meshwise.spec.words import text_of

MOMENT = 10.0  # seconds at most until the end of a process is known whose connections are gone, on a machine under load
_ENDED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]*)|exited unexpectedly)"
)
_CAUGHT = re.compile(r"Caught \w+ in (DataLoader worker process \d+)\.\nOriginal (.*)", re.DOTALL)
_FRAMES = re.compile(r"^Traceback \(most recent call last\):\n((?:  .*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'^(?=  File ")', re.MULTILINE)
_MEMORY = "Use fewer loader workers or smaller batches, which need less memory."
_SHARED = "Give the loader workers more shared memory (/dev/shm; docker run --shm-size), or use fewer of them."
_WITHOUT = "Run without loader workers (num_workers=0, loader_workers=0) to see where it fails."


@dataclass(frozen=True)
class Caught:
    """An error that a loader worker raised.

    where: the loader worker, such as `DataLoader worker process 0`.
    text: the class and the message, such as `ValueError: a damaged record`.
    traceback: the frames of the user's code only.
    """

    where: str
    text: str
    traceback: str


def ended(error: BaseException) -> tuple[str, str] | None:
    """Find out whether a loader worker of this rank has ended, from the text of `error` and of the errors that caused
    it. Return a phrase that says how it ended, and advice for the user. Return None if the errors do not mention such
    an end."""
    found: list[re.Match[str]] = []
    seen: BaseException | None = error
    while seen is not None:
        found += [match for match in [_ENDED.search(text_of(seen))] if match and isinstance(seen, RuntimeError)]
        seen = seen.__cause__ or seen.__context__
    if not found:
        return None
    told = next((match for match in found if match[2]), found[0])  # who reads a batch knows of no signal
    how = f"was killed by signal: {told[2]}" if told[2] else "exited"
    hint = " (often the system's out-of-memory killer)" if told[2] == "Killed" else ""
    remedy = {"Killed": _MEMORY, "Bus error": _SHARED}.get(told[2] or "", _WITHOUT)
    return f"lost its loader worker (process {told[1]}), which {how}{hint}", remedy


def await_end(error: BaseException) -> None:
    """Wait for a report on how a loader worker ended, if `error` says only that the connection to it broke."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, OSError | EOFError) and any(frame.name == "_try_get_data" for frame in frames):
        time.sleep(MOMENT)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def caught(error: BaseException) -> Caught | None:
    """Find out from the message of `error` which error a loader worker has raised."""
    found = _CAUGHT.match(text_of(error))
    traces = list(_FRAMES.finditer(found[2])) if found else []
    if found is None or not traces:
        return None
    frames = [frame for frame in _FRAME.split(traces[-1][1]) if frame]
    theirs = [frame for frame in frames if is_users(frame.partition('"')[2].partition('"')[0])]
    lines = "Traceback (most recent call last):\n" + "".join(theirs or frames)
    return Caught(found[1], found[2][traces[-1].end() :].strip(), lines)
