"""Show on stderr what is being measured.

Tested in tests/cli/test_bench.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from meshwise.machine.measure.progress import Progress
from meshwise.machine.measure.result import DeviceResult, PathResult
from meshwise.machine.views.bench_text import done_text


@contextmanager
def progress_shown() -> Iterator[Progress]:
    """Context manager that shows the progress of a bench on stderr, with a line for each finished measurement. A
    terminal also shows what is being measured at the moment."""
    console = Console(stderr=True)

    def line(done: PathResult | DeviceResult) -> None:
        console.print(f"measured    {done_text(done)}", soft_wrap=True, highlight=False, markup=False)

    if not console.is_terminal:
        yield Progress(done=line)
        return
    with console.status("measuring") as status:
        yield Progress(lambda text: status.update(f"measuring {text}"), line)
