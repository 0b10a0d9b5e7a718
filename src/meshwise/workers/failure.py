"""Who is to blame: the reports of failing workers, and the choice of the culprit among them.

When one worker dies, its peers fail a moment later in a collective. Such a victim must never be shown as the cause.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.spec.errors import MeshwiseError

OURS = Path(__file__).parents[1]

_COMMUNICATION_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "DistQueueEmptyError"}
_COMMUNICATION_WORDS = (
    "gloo",
    "connection closed by peer",
    "connection reset by peer",
    "nccl",
    "socket timeout",
    "tcpstore",
)


@dataclass(frozen=True)
class Failure:
    """What is known of one failed worker.

    kind: `raised`, `killed` (by a signal), `left` (without saying done) or `victim` (raised inside a collective).
    plain: the message is a sentence for the user, to be shown as it is. notes: what else is known, a line each.
    """

    rank: int
    kind: str
    message: str
    traceback: str = ""
    plain: bool = False
    notes: Sequence[str] = ()
    exit_code: int = 1
    time: float = 0.0


def is_communication_error(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, came out of a collective whose peer went away."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ in _COMMUNICATION_ERRORS:
            return True
        if isinstance(seen, RuntimeError) and any(word in str(seen).lower() for word in _COMMUNICATION_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def by_error(rank: int, error: BaseException) -> Failure:
    """The failure of a worker whose task raised `error`, as the worker itself reports it."""
    ours = isinstance(error, MeshwiseError)
    return Failure(
        rank,
        "victim" if not ours and is_communication_error(error) else "raised",
        f"{type(error).__name__}: {error}",
        "" if ours else user_traceback(error),
        plain=ours,
        notes=getattr(error, "__notes__", ()),
        exit_code=getattr(error, "exit_code", 1),
        time=time.time(),
    )


def user_traceback(error: BaseException) -> str:
    """The traceback without our own frames around the user's; whole when nothing but our own frames is in it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not Path(frame.filename).is_relative_to(OURS)]
    return "Traceback (most recent call last):\n" + "".join(traceback.format_list(theirs or frames))


def by_exit_status(rank: int, status: int) -> Failure:
    """The failure of a worker that ended without a report, from its exit status as `Popen.returncode` gives it."""
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
        name = names.get(-status, f"signal {-status}")
        hint = " (often the system's out-of-memory killer)" if -status == signal.SIGKILL else ""
        return Failure(rank, "killed", f"was killed by {name}{hint}", time=time.time())
    return Failure(rank, "left", f"left with exit code {status} without saying that its work is done", time=time.time())


def culprit(failures: Sequence[Failure]) -> Failure:
    """The failure to show: one that is nobody's consequence, and the earliest of those."""
    order = {"killed": 0, "raised": 0, "left": 1, "victim": 2}
    return min(failures, key=lambda failure: (order[failure.kind], failure.time))


def sentence(failure: Failure, size: int) -> str:
    """What the user reads: the culprit's rank, what happened, and its traceback once."""
    if failure.plain:
        return failure.message
    who = f"rank {failure.rank} of {size}"
    if failure.kind in ("killed", "left"):
        return f"{who} {failure.message}."
    what = "lost the connection to another rank" if failure.kind == "victim" else "failed"
    return "\n".join([f"{who} {what}: {failure.message}", *failure.notes, *failure.traceback.rstrip().splitlines()])
