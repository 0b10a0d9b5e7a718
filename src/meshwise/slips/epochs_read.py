"""Check that a resumed program has asked where it resumed.

One that counts epochs from 0 all the same trains too many.

Tested in tests/script/test_lost_in_a_loop.py.
"""

from __future__ import annotations

import linecache
import re
import sys
from typing import Any

from meshwise.spec.units import plural
from meshwise.spec.user_code import user_frame

_ONLY_SHOWN = re.compile(r"^\s*(\w+\.)*(print|info|log)\(")


class Asked:
    """Whether the program has asked for the epoch or the step at which it resumes."""

    def __init__(self) -> None:
        self._read = self._told = False

    def note(self) -> None:
        """Note that the program asks. A line that only shows it does not count."""
        if self._read or (frame := user_frame(sys._getframe(1))) is None:
            return
        self._read = not _ONLY_SHOWN.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno))

    def unread(self, epochs: int, extra: Any) -> str:
        """Return a warning, once, if an epoch begins after a resume that the program ignores. epochs: finished ones.
        extra: other restored values, which may count epochs themselves."""
        counts = isinstance(extra, dict) and any(re.search("epoch|step", str(name).lower()) for name in extra)
        if self._told or self._read or not epochs or counts:
            return ""
        self._told = True
        which = "epoch 1 is" if epochs == 1 else f"epochs 1 to {epochs} are"
        return (
            f"{which} over in the state that was restored, and the program has not read saved.epoch: a loop over all "
            f"epochs, such as range(4), trains {plural(epochs, 'epoch')} too many. Write for epoch in "
            "range(saved.epoch, …)."
        )
