"""Check that a resumed program has asked where it resumed.

A resumed program that counts epochs from 0 trains too many.

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
    """Records whether a resumed program has read the epoch or step at which it resumes."""

    def __init__(self) -> None:
        self._read = self._told = False

    def note(self) -> None:
        """Record that the program reads the epoch or step. A read in a source line that only prints or logs does not
        count."""
        if self._read or (frame := user_frame(sys._getframe(1))) is None:
            return
        self._read = not _ONLY_SHOWN.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno))

    def unread(self, epochs: int, extra: Any) -> str:
        """Return a warning if the resumed program has not read `epoch` of the object that `mw.checkpoint` returned.
        Such a program would train the finished epochs again. Return an empty string otherwise, and after the first
        warning.

        epochs: how many epochs were finished in the restored state.
        extra: the restored value of `mw.checkpoint(…, extra=...)`. If it is a dict with a name such as "epoch" or
            "step", the program counts epochs itself, and there is no warning."""
        counts = isinstance(extra, dict) and any(re.search("epoch|step", str(name).lower()) for name in extra)
        if self._told or self._read or not epochs or counts:
            return ""
        self._told = True
        which = "epoch 1 is" if epochs == 1 else f"epochs 1 to {epochs} are"
        return (
            f"{which} over in the restored state, but the program has not read saved.epoch. A loop over all "
            f"epochs, such as range(4), trains {plural(epochs, 'epoch')} too many. Write for epoch in "
            "range(saved.epoch, …)."
        )
