"""Show the progress of a run, live or as plain lines.

A terminal that closes in the middle of a run ends the drawing, never the run. Notebooks get plain lines, not a widget.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from meshwise.spec.units import bytes_text, rate_text, whole_seconds_text

REFRESH_SECONDS = 0.25
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_LOSSES = 24
BAR_WIDTH = 40


@dataclass(frozen=True)
class TrainingProgress:
    """How far the training has come. A value of None means unknown.

    epoch, step: the current epoch, and the step in it, both from 1.
    steps: the number of steps per epoch. It is unknown for a stream of unknown length.
    memory: how many bytes of memory each rank uses.
    """

    job: str
    epoch: int
    epochs: int
    step: int
    steps: int | None
    loss: float | None
    samples_per_second: float | None
    seconds_left: float | None
    memory: tuple[int | None, ...]


def progress_line(p: TrainingProgress) -> str:
    """Describe the progress in one line."""
    parts = [f"epoch {p.epoch:>{len(str(p.epochs))}}/{p.epochs}", _step_text(p)]
    if p.loss is not None:
        parts.append(f"loss {loss_text(p.loss)}")
    if p.samples_per_second is not None:
        parts.append(f"{rate_text(p.samples_per_second)} samples/s")
    return "  ".join(parts)


def loss_text(loss: float) -> str:
    """Format a loss with four decimals. Very large or very small losses become `1,234.5` or `1.234e-05`."""
    if loss == 0 or not math.isfinite(loss) or 1e-3 <= abs(loss) < 1e3:
        return f"{loss:.4f}"
    return f"{loss:,.1f}" if 1e3 <= abs(loss) < 1e6 else f"{loss:.3e}"


def sparkline(values: Sequence[float]) -> str:
    """Draw values as a row of block characters, scaled from the lowest to the highest value."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((v - low) * scale)] if math.isfinite(v) else "?" for v in values)


class LiveView:
    """Context manager that shows the progress of a run on a console.

    console: the default is stdout.

    Any thread may call any method, and no method raises an exception. Even after the view is closed, printing on the
    console raises no exception.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = Console() if console is None else console
        if not isinstance(console.file, _GuardedFile):  # otherwise, rich ends the process if a pipe breaks
            console.file = cast("IO[str]", _GuardedFile(console.file))
        self._console = console
        self.draws = console.is_terminal and console.is_interactive and not console.is_dumb_terminal
        self._lock = threading.Lock()  # one writer at a time: rich moves the cursor relative to what it drew last
        self._newest: TrainingProgress | None = None
        self._losses: deque[float] = deque(maxlen=SPARKLINE_LOSSES)
        self._live: Live | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self.draws:
            self._thread = threading.Thread(target=self._refresh, name="meshwise live view", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        drawn = self._live is not None
        self.close()
        if error is not None and drawn and self._newest is not None:
            self.print(progress_line(self._newest))  # `close` has removed the live area, so print the last progress

    def update(self, p: TrainingProgress) -> None:
        """Show the progress `p`. On a terminal it is drawn at the next refresh. Elsewhere a line is printed
        immediately."""
        if self._thread is None:
            self.print(progress_line(p))
            return
        if p.loss is not None and (self._newest is None or p.loss != self._newest.loss):
            self._losses.append(p.loss)
        self._newest = p

    def print(self, text: str) -> None:
        """Print text of the run as it is. Markup of the console library is not interpreted."""
        with self._lock:
            if self._live is not None:
                # `from_ansi` keeps colors, and drops cursor movements and text that a carriage return overwrites.
                self._console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)
            elif not self._console.quiet:
                self._console.file.write(f"{text}\n")
                self._console.file.flush()

    def close(self) -> None:
        """Remove the live area and show the cursor again. May be called twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._lock:
            if self._live is not None:
                self._live.update(Text(""))  # empty it: `stop` would leave lines of an area higher than the terminal
                self._live.stop()
                self._live = None

    def _refresh(self) -> None:
        shown: TrainingProgress | None = None
        while not self._over.wait(REFRESH_SECONDS):
            newest = self._newest
            if newest is None or newest is shown:
                continue
            shown = newest
            area = live_area(newest, list(self._losses), self._console)
            with self._lock:
                if self._live is None:
                    self._live = quiet_live(self._console, screen=False)
                    self._live.start()
                self._live.update(area, refresh=True)


def quiet_live(console: Console, *, screen: bool) -> Live:
    """Make a rich Live that is drawn only by `update`, and leaves stdout and stderr alone."""
    return Live(
        None,
        console=console,
        screen=screen,
        auto_refresh=False,
        transient=not screen,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def live_area(p: TrainingProgress, losses: Sequence[float], console: Console) -> RenderableType:
    """Draw the progress of a run."""
    part = p.step / p.steps if p.steps else None
    whole = (p.epoch - 1 + (part or 0.0)) / p.epochs if p.epochs else 0.0
    bars = Table.grid(
        Column(no_wrap=True, min_width=6), Column(max_width=BAR_WIDTH), Column(justify="right"), "", padding=(0, 2)
    )
    for name, share, text in (("epoch", part, _step_text(p)), ("run", whole, f"epoch {p.epoch}/{p.epochs}")):
        bar = ProgressBar(total=None if share is None else 1.0, completed=share or 0.0, pulse=share is None)
        bars.add_row(name, bar, "" if share is None else f"{int(share * 100)} %", Text(text, no_wrap=True))
    facts = _facts(p, [] if console.options.ascii_only else losses, console.width)
    title = Text(p.job, style="bold", no_wrap=True, overflow="ellipsis")
    known = any(size is not None for size in p.memory)
    return Group(title, bars, facts, *[Text(f"memory  {memory_text(p.memory)}", no_wrap=True)] * known)


def memory_text(memory: Sequence[int | None]) -> str:
    """Format the memory of each rank, or the least and the most if there are many ranks."""
    if len(memory) <= 4:
        return ", ".join("unknown" if size is None else bytes_text(size) for size in memory)
    known = [size for size in memory if size is not None]
    return f"{bytes_text(min(known))} to {bytes_text(max(known))}"


def _facts(p: TrainingProgress, losses: Sequence[float], width: int) -> Text:
    loss = "not yet known" if p.loss is None else loss_text(p.loss)
    rest = "" if p.samples_per_second is None else f"   {rate_text(p.samples_per_second)} samples/s"
    rest += "" if p.seconds_left is None else f"   {whole_seconds_text(p.seconds_left)} left"
    facts = Text("loss    ", no_wrap=True, overflow="ellipsis").append(loss, style="bold")
    room = width - len("loss    ") - len(loss) - len(rest) - 2
    if len(losses) > 1 and room > 1:
        facts.append(f"  {sparkline(losses[-room:])}", style="cyan")
    return facts.append(rest)


def _step_text(p: TrainingProgress) -> str:
    return f"step {p.step}" if p.steps is None else f"step {p.step:>{len(str(p.steps))}}/{p.steps}"


class _GuardedFile:
    """A text file whose writes never raise an exception, even if the reader of the file is gone."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._gone = file, False

    def write(self, text: str) -> int:
        self._while_read(self._write, text)
        return len(text)

    def flush(self) -> None:
        self._while_read(self._file.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _while_read(self, act: Callable[..., object], *arguments: object) -> None:
        try:
            if not self._gone:
                act(*arguments)
        except BlockingIOError:
            pass  # the reader is slow, not gone
        except (OSError, ValueError):  # ValueError: the file was closed
            self._gone = True

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
        except UnicodeEncodeError as error:
            self._file.write(text.encode(error.encoding, "replace").decode(error.encoding))
