"""Tell notices about a plan and a program once, on rank 0.

Tested in tests/engine/test_step_mistakes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from meshwise.transfer import collectives


class Notices:
    """Prints each notice for the user once, on rank 0. say: prints a line. untrue: notices that would be false in this
    run, and are therefore not printed."""

    def __init__(self, say: Callable[[str], None], untrue: Container[str] = ()) -> None:
        self._say, self.untrue = say, untrue
        self._said = set[str]()  # to the newest program of the process
        self.all: list[str] = []
        """All notices so far. Every rank keeps them."""

    def __call__(self, text: str) -> None:
        """Print `text` for the user on rank 0, unless it was printed before. An empty text is not printed."""
        if not text or text in self._said or text in self.untrue:
            return
        self._said.add(text)
        self.all += [text] if text not in self.all else []
        if collectives.get_rank(collectives.everyone()) == 0:
            self._say(text)

    def program_begins(self) -> None:
        """Allow every notice to be printed again, because another program begins in this process."""
        self._said.clear()
