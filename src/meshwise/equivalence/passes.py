"""The passes of a check, for whoever waits for it: which one runs, and how many of its steps are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwise.workers.channel import Message
from meshwise.workers.join import rank_context


class Passes:
    """Tells which pass of a check runs. notify: takes a line for each; progress: takes where the check stands now."""

    def __init__(
        self, what: Sequence[str], steps: int, notify: Callable[[str], None], progress: Callable[[str], None]
    ) -> None:
        """what: what each pass runs, in their order."""
        self._what, self._steps, self._notify, self._progress = what, steps, notify, progress
        self._running = 0

    def begin(self) -> None:
        """The next pass begins."""
        self._running += 1
        self._notify(f"{self._number()}: {self._what[self._running - 1]}")

    def received(self, rank: int, message: Message) -> None:
        """What a worker says of itself."""
        if message["kind"] == "pass":
            self.begin()
        elif message["kind"] == "checked":
            self._progress(f"{self._number()}, step {message['step']} of {self._steps}")
        elif message["kind"] == "note":
            self._notify(f"{self._number()}: {message['text']}")

    def _number(self) -> str:
        return f"pass {self._running} of {len(self._what)}"


def say_next_pass() -> None:
    """In a worker: it goes on with another pass."""
    _send("pass")


def say_step(step: int) -> None:
    """In a worker: so many steps of the pass are done."""
    _send("checked", step=step)


def _send(kind: str, **facts: int) -> None:
    context = rank_context()
    if context.channel is not None and context.world.rank == 0:
        context.channel.send(kind, **facts)
