"""Report which pass of a check runs, and its progress.

A pass is one run of the checked program. Progress is how many of its steps are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwise.workers.channel import Message
from meshwise.workers.join import rank_context


class Passes:
    """Reports which pass of a check runs. A pass is one run of the checked program."""

    def __init__(self, what: Sequence[str], notify: Callable[[str], None], progress: Callable[[str], None]) -> None:
        """what: a description of each pass, in order."""
        self._what, self._notify, self._progress = what, notify, progress
        self._begun = 0

    def begin(self) -> Callable[[int, Message], None]:
        """Report that the next pass begins. Return a function that receives the workers' messages."""
        now = self._next()

        def received(rank: int, message: Message) -> None:
            nonlocal now
            if message["kind"] == "pass":
                now = self._next()
            elif message["kind"] == "checked":
                self._progress(f"{now}, step {message['step']}")
            elif message["kind"] == "note":
                self._notify(f"{now}: {message['text']}")

        return received

    def _next(self) -> str:
        self._begun += 1
        now = f"pass {self._begun} of {len(self._what)}"
        self._notify(f"{now}: {self._what[self._begun - 1]}")
        return now


def say_next_pass() -> None:
    """Tell the launching process that the next pass begins."""
    _send("pass")


def say_step(step: int) -> None:
    """Tell the launching process how many optimizer steps the current pass has made."""
    _send("checked", step=step)


def _send(kind: str, **facts: int) -> None:
    context = rank_context()
    if context.channel is not None and context.world.rank == 0:
        context.channel.send(kind, **facts)
