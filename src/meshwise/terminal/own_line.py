"""What is said last begins a line of its own, whatever a program has printed before it. Tested in tests/cli."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_ended: dict[Any, bool] = {}
"""Of each file that is watched, whether its last line has ended."""


@contextlib.contextmanager
def watched(*files: Any) -> Iterator[None]:
    """Meanwhile it is known of these text files whether their last line has ended."""
    for file in files:
        _watch(file)
    try:
        yield
    finally:
        for file in files:
            del file.write, _ended[file]


def _watch(file: Any) -> None:
    write, _ended[file] = file.write, True

    def watching(text: str) -> Any:
        if text:
            _ended[file] = text.endswith("\n")
        return write(text)

    file.write = watching  # print, tracebacks and rich ask the file for it


def end_lines() -> None:
    """End the last line of each file that is watched, and let nothing of it wait."""
    for file, ended in _ended.items():
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or the program has closed it
            if not ended:
                file.write("\n")
            file.flush()
