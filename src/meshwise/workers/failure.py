"""Choose the culprit among the reports of failing workers.

When one worker dies, its peers fail a moment later in a collective. Such a victim must never be shown as the cause.
"""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwise.spec.addresses import address_of
from meshwise.spec.errors import MeshwiseError, ReplicaError, SpoiledError, UsageError, WorkerFailed
from meshwise.spec.exit_codes import INTERRUPTED
from meshwise.spec.user_code import OURS, name_line, raised_at
from meshwise.spec.words import error_text, readable, text_of
from meshwise.workers import fast_exit

MORE_MEMORY = "Reduce the memory that the ranks of this machine use, or give them more memory."
LINK = "The ranks lost their connections to each other, but all ranks still run. Check the network between them."
_COMMUNICATION_ERRORS = {
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "DistError",
    "DistQueueEmptyError",
}
CULPRIT_TIMEOUT, VICTIMS_TIMEOUT = 1.0, 10.0
_CONNECTION_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection timed out",
)
_COMMUNICATION_WORDS = ("gloo", "nccl", "socket timeout", "tcpstore", *_CONNECTION_WORDS)

LOADER_TIMEOUT = 10.0  # seconds to wait for torch to report the end of a disconnected loader worker
# Patterns of messages of torch 2.11, 2.13 and 2.15 (`_utils.py`, `utils/data/dataloader.py`, `csrc/DataLoader.cpp`).
_LOADER_ENDED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]*)|exited unexpectedly)"
)
_LOADER_RAISED = re.compile(
    r"Caught \w+ in (DataLoader worker process \d+)\.\nOriginal (.*Traceback [^\n]*\n(?:  [^\n]*\n)+)(.*)",
    re.DOTALL,
)
_LOADER_REMEDIES = {
    "Killed": "Use fewer loader workers or smaller batches, which need less memory.",
    "Bus error": "Give the loader workers more shared memory (/dev/shm; docker run --shm-size), or use fewer of them.",
}
_WITHOUT_LOADERS = "Run without loader workers (num_workers=0, loader_workers=0) to see where it fails."


@dataclass(frozen=True)
class Failure:
    """What is known about the failure of one worker.

    kind: how the worker failed, as one of these words:
        `raised`: the task raised an exception.
        `killed`: a signal killed the worker.
        `loader`: a loader worker of this worker died.
        `left`: the worker ended without reporting success.
        `victim`: a collective failed because another rank was gone.
        `hung`: the worker made no progress.
        `lost`: the machine of the worker is gone.
        `link`: all ranks live, but lost their connections to each other.
        `corrupt`: values of the worker differ from those of its replicas.
        `spoiled`: parameters became infinite or NaN, so the run must go back to a saved state.
        `diverged`: ranks made different calls.
    plain: whether `message` is a sentence for the user, which is shown unchanged.
    notes: further facts, one line each.
    smaller: (plan, text). The plan, as TOML, needs less memory, and the text says what it changes. It is empty unless
        the worker ran out of memory and such a plan is known.
    more: the section of docs/ that explains the error. It is empty if there is no such section.
    step: the step that the rank was in.
    done: the last step that all ranks of this machine are known to have finished.
    """

    rank: int
    kind: str
    message: str
    traceback: str = ""
    plain: bool = False
    notes: Sequence[str] = ()
    exit_code: int = 1
    smaller: Sequence[str] = ()
    more: str = ""
    time: float = 0.0
    step: int | None = None
    done: int = 0

    @property
    def of_machine(self) -> bool:
        """Whether the failure was caused by the machine and not by the user's program. The run may then be
        restarted."""
        return self.kind in ("killed", "loader", "left", "hung", "lost", "link", "corrupt", "spoiled")


def is_gloo_abort(line: str) -> bool:
    """Check whether a line of a worker's output is a message of gloo, which aborts a process if ranks call different
    collectives at the same time."""
    return "instance of 'gloo::EnforceNotMet'" in line or ("what():" in line and "third_party/gloo" in line)


def is_communication_error(error: BaseException) -> bool:
    """Check whether `error`, or an error that caused it, was raised by a collective that lost another rank."""
    return any(
        type(each).__name__ in _COMMUNICATION_ERRORS
        or (isinstance(each, RuntimeError) and any(word in text_of(each).lower() for word in _COMMUNICATION_WORDS))
        for each in _causes(error)
    )


def by_error(rank: int, error: BaseException) -> Failure:
    """Return the failure of a worker whose task raised `error`. The worker itself calls this function."""
    if lost := loader_end(error):
        return Failure(rank, "loader", lost[0], notes=[lost[1], *_notes(error)], time=time.time())
    ours, in_loader = isinstance(error, MeshwiseError), _LOADER_RAISED.match(text_of(error))
    if isinstance(error, UsageError):
        name_line(error)
    told = "" if ours or (isinstance(error, OSError) and not raised_at(error)) else user_traceback(error)
    return Failure(
        rank,
        _kind_of(rank, error),
        readable(in_loader[3].strip()) if in_loader else error_text(error),
        f"{in_loader[2]}in {in_loader[1]}" if in_loader else told,
        plain=ours,
        notes=_notes(error),
        exit_code=error.exit_code if isinstance(error, MeshwiseError) else 1,
        smaller=getattr(error, "smaller_plan", ()),
        more=address_of(error) if ours else "",
        time=time.time(),
    )


def loader_end(error: BaseException) -> tuple[str, str] | None:
    """Find out whether a loader worker of this rank has ended, from the text of `error` and of the errors that caused
    it. Return a phrase that says how it ended, and advice for the user. Return None if they mention no such end."""
    texts = [text_of(each) for each in _causes(error) if isinstance(each, RuntimeError)]
    found = [match for match in map(_LOADER_ENDED.search, texts) if match]
    if not found:
        return None
    told = next((match for match in found if match[2]), found[0])  # prefer a text that names the signal
    how = f"was killed by signal: {told[2]}" if told[2] else "exited"
    hint = " (often the system's out-of-memory killer)" if told[2] == "Killed" else ""
    remedy = _LOADER_REMEDIES.get(told[2], _WITHOUT_LOADERS)
    return f"lost its loader worker (process {told[1]}), which {how}{hint}", remedy


def await_loader_end(error: BaseException) -> None:
    """Wait for a report on an ended loader worker if `error` tells only of its connection. Then reset SIGCHLD."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, OSError | EOFError) and any(frame.name == "_try_get_data" for frame in frames):
        time.sleep(LOADER_TIMEOUT)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _notes(error: BaseException) -> list[str]:
    return [readable(text_of(note)) for note in getattr(error, "__notes__", ())]


def by_exit(rank: int, exit: SystemExit) -> Failure:
    """Return the failure of a worker whose task exited with a non-zero code.

    The run exits with the same code if that is between 1 and 255, else with 1.
    """
    code, at = exit.code if isinstance(exit.code, int) else 1, raised_at(exit)
    message = f"{at}: " * bool(at) + f"left with exit code {code}"
    message = message if exit.code == code else readable(text_of(exit.code))
    return Failure(rank, "raised", message, exit_code=code if 0 < code < 256 else 1, time=time.time())


def of_command(error: BaseException) -> MeshwiseError:
    """Return the error to show for a command in which the user's program failed, was interrupted or called
    `sys.exit`."""
    if isinstance(error, MeshwiseError):
        return error
    if isinstance(error, KeyboardInterrupt):
        shown: MeshwiseError = WorkerFailed("stopped by Ctrl-C.", exit_code=INTERRUPTED)
    elif isinstance(error, SystemExit):
        shown = UsageError(fast_exit.OF_COMMAND.format(call=f"sys.exit({error.code!r})"))
    else:
        return WorkerFailed(f"{user_traceback(error).rstrip()}\nthe program failed: {error_text(error)}")
    shown.__traceback__ = error.__traceback__
    name_line(shown)
    return shown


def _kind_of(rank: int, error: BaseException) -> str:
    if isinstance(error, ReplicaError):  # ranks with the right values raise this error too
        return "corrupt" if rank in error.ranks else "victim"
    if isinstance(error, SpoiledError):
        return "spoiled" if rank == error.ranks[0] else "victim"
    return "victim" if not isinstance(error, MeshwiseError) and is_communication_error(error) else "raised"


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error, without the frames of meshwise itself. If there are no other frames, all frames
    are kept."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((OURS, "<frozen "))] or list(frames)
    return "Traceback (most recent call last):\n" + "".join(traceback.format_list(theirs))


def by_exit_status(rank: int, status: int, out_of_memory: Callable[[], str | None] = lambda: None) -> Failure:
    """Return the failure of a worker that ended without a report."""
    if status < 0:
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have no name
        name = names.get(-status, f"signal {-status}")
        why = out_of_memory() if -status == signal.SIGKILL else ""
        if why:
            text = f"was killed by the kernel's out-of-memory killer ({name}; {why})"
            return Failure(rank, "killed", text, notes=[MORE_MEMORY], time=time.time())
        hint = " (often the system's out-of-memory killer)" if why is None else ""
        return Failure(rank, "killed", f"was killed by {name}{hint}", time=time.time())
    return Failure(rank, "left", f"left with exit code {status} without saying that its work is done", time=time.time())


def culprit(failures: Sequence[Failure], ranks: int = 0) -> Failure:
    """Choose the failure to show: the earliest failure that was not caused by another failure.

    If every rank lost a connection but no rank died, the result is a failure of the link between the ranks. A rank that
    the out-of-memory killer ended cannot suggest a plan that needs less memory. Its failure gets the plan that another
    rank has suggested.
    ranks: the number of ranks of the run.
    """
    later = {"left": 1, "victim": 2}
    first = min(failures, key=lambda failure: (later.get(failure.kind, 0), failure.time))
    # A rank that was killed for lack of memory gets another rank's smaller plan. A victim needs no smaller plan.
    if first.kind == "victim" or MORE_MEMORY in first.notes:
        known = [failure.smaller for failure in failures if failure.smaller]
        first = replace(first, smaller=known[0] if known and first.kind == "killed" else ())
    lost = {f.rank for f in failures if any(word in f.message.lower() for word in _CONNECTION_WORDS)}
    all_lost = first.kind == "victim" and len(lost) == ranks > 1
    return replace(first, kind="link", message=LINK, plain=True, traceback="") if all_lost else first


def recorded(failure: Failure) -> dict[str, Any]:
    """Return the facts to record about the failure that ended an attempt."""
    verb = "failed: " if failure.kind == "raised" else ""
    first = (failure.message.strip().splitlines() or [""])[0].rstrip(".")
    reason = first if failure.plain else f"rank {failure.rank} {verb}{first}"
    return {"kind": failure.kind, "rank": failure.rank, "step": failure.step, "reason": reason}


def patience(failures: Sequence[Failure]) -> float:
    """Return how many seconds to wait for further failures, since a later failure may be the cause of these
    failures."""
    if all(failure.kind == "victim" for failure in failures):  # no failure is a cause yet: wait longer
        return VICTIMS_TIMEOUT
    certain = any(failure.kind not in ("left", "victim") for failure in failures)
    return CULPRIT_TIMEOUT / 4 if certain else CULPRIT_TIMEOUT


def sentence(failure: Failure, size: int, others: Sequence[Failure] = ()) -> str:
    """Return the text on a failure for the user: first the traceback, then which rank failed and how.

    size: the number of ranks.
    others: the other known failures. If all ranks failed alike, the text says so.
    """
    if failure.plain:
        return failure.message
    who, own = f"rank {failure.rank} of {size}", f"rank {failure.rank}, "
    where = [note for note in failure.notes if note.startswith(own)]  # the step and the phase, printed before the cause
    notes = [note for note in failure.notes if note not in where]
    before = [*failure.traceback.rstrip().splitlines(), *where]
    if failure.kind in ("killed", "left", "loader"):
        return "\n".join([*before, " ".join([f"{who} {failure.message}.", *notes])])
    if size > 1 and len({f.rank for f in (failure, *others) if f.message == failure.message}) == size:
        who = f"all {size} ranks"
    what = "lost the connection to another rank" if failure.kind == "victim" else "failed"
    return "\n".join([*before, f"{who} {what}: {failure.message}", *notes])
