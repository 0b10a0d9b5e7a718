"""Tell what a rank's device waits for when the rank hangs.

A thread of the rank answers, since the main thread may wait forever. Tested in tests/workers/test_on_device.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwise.torch_compat.flight_recorder import GroupProgress, progress
from meshwise.workers.channel import WorkerChannel
from meshwise.workers.hang import ASKED


def answer(channel: WorkerChannel, rank: int, ask: Callable[[], Sequence[GroupProgress]] = progress) -> None:
    """Let this rank answer when the launcher asks what its device waits for."""

    def tell(message: Mapping[str, Any]) -> None:
        found = [str(each) for each in ask()]
        if found:
            channel.send("note", text=f"rank {rank}, by torch's flight recorder: {'; '.join(found)}.")

    channel.listeners[ASKED] = tell
