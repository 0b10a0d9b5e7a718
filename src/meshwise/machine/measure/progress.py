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
    """Called while a machine is measured. starts: what is measured now, in words; done: a path or a device that has
    been measured; found: the machines of all hosts, before anything between them is measured."""

    starts: Callable[[str], object] = _ignore
    done: Callable[[PathResult | DeviceResult], object] = _ignore
    found: Callable[[Sequence[Machine]], object] = _ignore


SILENT = Progress()


def sent_over(channel: WorkerChannel | None) -> Progress:
    """The progress of a worker, sent to its launcher, which gets it by `listeners`. None: a worker of no launcher."""
    if channel is None:
        return SILENT

    def sender(event: str) -> Callable[[object], None]:
        return lambda value: channel.send("measuring", event=event, value=pickle.dumps(value).hex())

    return Progress(*(sender(field.name) for field in fields(Progress)))


def listeners(progress: Progress) -> Listeners:
    """What a launcher does with the messages of its workers, to have their progress."""

    def received(rank: int, message: Message) -> None:
        if message["kind"] == "measuring":
            getattr(progress, message["event"])(pickle.loads(bytes.fromhex(message["value"])))

    return Listeners(message=received)
