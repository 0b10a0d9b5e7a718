"""One way for every collective: carried out now or begun, recorded as a span, told to the log, or only counted.

A collective over all ranks has a number, which names it on every rank since all enter it in one order. One over a
group, a send and a receive have none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from meshwise.compat.collectives import Begun, backend_of
from meshwise.timeline.recorder import current
from meshwise.timeline.spans import NO_COLLECTIVE
from meshwise.transfer.comm_log import OPEN, note
from meshwise.transfer.null import Counted, NullGroup, null_world

T = TypeVar("T")
Group = dist.ProcessGroup | NullGroup | None
"""The ranks that take part: a group of torch's, one of a world that is played, or None for all ranks."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """One collective. begin(later) starts it for a real group; result gives what the caller gets when it is done.

    alone gives what a group of one gets, or a rank of a world that is only played. ends: ranks of the group from which
    and to which the bytes go, None for all of them; point: only these two take part.
    """

    kind: str
    bytes: int
    device: torch.device
    group: Group
    begin: Callable[[bool], Begun]
    result: Callable[[], T]
    alone: Callable[[], T]
    ends: tuple[int | None, int | None] = (None, None)
    point: bool = False


def world_size(group: Group = None) -> int:
    """How many ranks the run has, or the group; 1 outside a process group."""
    if group is None and null_world() is None:
        return dist.get_world_size() if dist.is_initialized() else 1
    return len(ranks_of(group))


def ranks_of(group: Group = None) -> tuple[int, ...]:
    """The ranks of a group, as the world counts them."""
    if isinstance(group, NullGroup):
        return group.ranks
    played = null_world()
    if played is not None:
        return played.ranks
    if not dist.is_initialized():
        return (0,)
    return tuple(range(dist.get_world_size())) if group is None else tuple(dist.get_process_group_ranks(group))


def own_rank(group: Group = None) -> int:
    """This process among the ranks of the group."""
    played = null_world()
    if played is not None:
        return ranks_of(group).index(played.rank)
    return dist.get_rank(group) if dist.is_initialized() else 0  # type: ignore[arg-type]


def now(call: Call[T]) -> T:
    """Carry out a collective and wait for it: on a CPU until it is there, on an accelerator in its stream."""
    unreal = _unreal(call)
    if unreal is not None:
        return unreal()
    recorder = current()
    number = NO_COLLECTIVE if call.point or call.group is not None else recorder.arrive()
    code = recorder.code("communication", call.kind)
    seconds = _watch(call.device) if OPEN else None
    start = recorder.mark()
    call.begin(False).wait()
    recorder.add(code, start, recorder.mark(), call.bytes, number)
    if seconds is not None:
        _tell(call, seconds())
    return call.result()


def later(call: Call[T]) -> Callable[[], T]:
    """Begin a collective; call what is returned to wait for it. Its span ends when it does, or where it is waited for
    when the backend does not tell."""
    unreal = _unreal(call)
    if unreal is not None:
        value = unreal()
        return lambda: value
    seconds = _watch(call.device) if OPEN else None
    wait_for = _begin(call)[0]
    done: list[T] = []

    def wait() -> T:
        if not done:
            wait_for()
            done.append(call.result())
            if seconds is not None:
                _tell(call, seconds())
        return done[0]

    return wait


def begun_future(call: Call[T]) -> torch.futures.Future[T]:
    """Begin a collective; the future gives its result. Waits where the backend has no future for it."""
    unreal = _unreal(call)
    if unreal is None:
        wait_for, future = _begin(call)
        if future is not None:
            return future
        wait_for()
        unreal = call.result
    done: torch.futures.Future[T] = torch.futures.Future()
    done.set_result(unreal())
    return done


@contextlib.contextmanager
def recorded(kind: str, bytes: int, group: Group) -> Iterator[None]:
    """The with-body is a collective of torch's own, which this rank waits for, on an accelerator in another stream."""
    recorder = current()
    number = recorder.arrive() if world_size(group) == world_size() else NO_COLLECTIVE
    code = recorder.code("communication", kind, recorder.lane_beside)
    start = recorder.mark()
    yield
    recorder.add(code, start, recorder.mark(), bytes, number)


def _begin(call: Call[T]) -> tuple[Callable[[], object], torch.futures.Future[T] | None]:
    """What waits for the communication, and its future where there is one. Its span is recorded at its end."""
    recorder = current()
    number = NO_COLLECTIVE if call.point or call.group is not None else recorder.arrive()
    start = recorder.mark()
    code = recorder.code("communication", call.kind, "communication")
    begun = call.begin(True)
    future = begun.future()
    if future is None:

        def wait_for() -> None:
            begun.wait()
            recorder.add(code, start, recorder.mark(), call.bytes, number)

        return wait_for, None

    def ended(done: torch.futures.Future[object]) -> T:
        recorder.add(code, start, recorder.mark(), call.bytes, number)
        done.value()  # raises what went wrong
        return call.result()

    told: torch.futures.Future[T] = future.then(ended)
    return told.wait, told


def _unreal(call: Call[T]) -> Callable[[], T] | None:
    """What stands for a collective that is not carried out: in a world that is played, or in a group of one."""
    played = null_world()
    if played is not None:
        ranks = ranks_of(call.group)
        if len(ranks) > 1:
            taking = tuple(ranks[end] for end in call.ends if end is not None) if call.point else ranks
            played.counts.append(Counted(call.kind, call.bytes, taking))
        return call.alone
    return call.alone if world_size(call.group) == 1 else None


def _watch(device: torch.device) -> Callable[[], float | Callable[[], float]]:
    """Begin to take the time; the second call gives seconds, or on CUDA a function that waits for them."""
    if device.type == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()

        def on_device() -> Callable[[], float]:
            last.record()
            return elapsed

        def elapsed() -> float:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3

        return on_device
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


def _tell(call: Call[T], seconds: float | Callable[[], float]) -> None:
    ranks = ranks_of(call.group)
    everyone = "all ranks" if call.group is None else f"ranks {','.join(map(str, ranks))}"
    source, target = (everyone if end is None else f"rank {ranks[end]}" for end in call.ends)
    path = backend_of(call.device, call.group)  # type: ignore[arg-type]
    note(call.kind, source, target, call.bytes, path, seconds)
