"""Register the views of a report.

Each is a file of this folder with a function `render(report, timeline)`, and a line here.

The command line has an option for each: `--html` writes report.html, `--mermaid` prints. A view is imported when it is
asked for: the help of the options needs none.

Tested in tests/cli/test_report.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class View:
    """module: its file in this folder. help: of its option. file: name of the file it writes, "" if it is printed."""

    module: str
    help: str
    file: str = ""

    @property
    def render(self) -> Callable[[Any, Any], str | Iterable[bytes]]:
        """The function that writes the view of a Report and a Timeline, as text or pieces of bytes."""
        made: Callable[[Any, Any], str | Iterable[bytes]] = import_module(f"{__package__}.{self.module}").render
        return made


EVENTS = "tensorboard/report/events.out.tfevents.report"
VIEWS = {
    "html": View("html_page", "write one page that works offline: report.html", "report.html"),
    "trace": View("chrome_trace", "write trace.json.gz for Perfetto", "trace.json.gz"),
    "openmetrics": View("openmetrics", "write metrics.prom for Prometheus", "metrics.prom"),
    "tensorboard": View("tensorboard", "write TensorBoard events", EVENTS),
    "mermaid": View("mermaid", "print the Gantt chart of a step for Markdown"),
    "json": View("json_text", "print every number as JSON"),
}
