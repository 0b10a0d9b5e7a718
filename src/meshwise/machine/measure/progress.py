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
    """Functions that are called during a bench.

    starts: called with a name before each measurement.
    done: called with each result of a path or a device.
    found: called with the machines of all hosts, before links between hosts are measured.
    """

    starts: Callable[[str], object] = _ignore
    done: Callable[[PathResult | DeviceResult], object] = _ignore
    found: Callable[[Sequence[Machine]], object] = _ignore


SILENT = Progress()


def sent_over(channel: WorkerChannel | None) -> Progress:
    """Return callbacks with which a worker reports the progress of its measurement to its launcher. In the launcher,
    the function `listeners` makes the object that receives these reports.

    channel: the connection to the launcher. If it is None, the callbacks do nothing.
    """
    if channel is None:
        return SILENT

    def sender(event: str) -> Callable[[object], None]:
        return lambda value: channel.send("measuring", event=event, value=pickle.dumps(value).hex())

    return Progress(*(sender(field.name) for field in fields(Progress)))


def listeners(progress: Progress) -> Listeners:
    """Return the functions with which a launcher listens to its workers during a bench. They call the functions of
    `progress` with what the workers send."""

    def received(rank: int, message: Message) -> None:
        if message["kind"] == "measuring":
            getattr(progress, message["event"])(pickle.loads(bytes.fromhex(message["value"])))

    return Listeners(message=received)
