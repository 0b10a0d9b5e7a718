"""Route a measurement's progress to its caller, or to the launcher.

Tested in tests/machine/test_processes.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from meshwise.machine.measure.result import DeviceResult, PathResult
from meshwise.spec.machine import Machine
from meshwise.workers.channel import Message, WorkerChannel
from meshwise.workers.listeners import Listeners


def _ignore(event: object) -> None:
    return None


@dataclass(frozen=True)
class Progress:
    """Callbacks during a bench. starts(name): before each measurement. done(result): after a path or a device is
    measured. found(machines): with all hosts, before anything between them is measured."""

    starts: Callable[[str], object] = _ignore
    done: Callable[[PathResult | DeviceResult], object] = _ignore
    found: Callable[[Sequence[Machine]], object] = _ignore


SILENT = Progress()


def sent_over(channel: WorkerChannel | None) -> Progress:
    """Return callbacks that send a worker's progress to its launcher, for its `listeners`; None: no launcher."""
    if channel is None:
        return SILENT

    def sender(event: str) -> Callable[[object], None]:
        return lambda value: channel.send("measuring", event=event, value=pickle.dumps(value).hex())

    return Progress(*(sender(field.name) for field in fields(Progress)))


def listeners(progress: Progress) -> Listeners:
    """Return listeners for a launcher, which call `progress` with what its workers send."""

    def received(rank: int, message: Message) -> None:
        if message["kind"] == "measuring":
            getattr(progress, message["event"])(pickle.loads(bytes.fromhex(message["value"])))

    return Listeners(message=received)
