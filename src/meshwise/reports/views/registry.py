"""Register the views of a report.

Each view has an entry here, and a function such as `render(report, timeline)` in this folder.

The command line has an option for each view: `--html` writes report.html, `--mermaid` prints. A view is imported only
when it is requested, because its help text is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class View:
    """A way to show a report."""

    module: str
    help: str
    file: str = ""
    function: str = "render"

    @property
    def render(self) -> Callable[[Any, Any], str | Iterable[bytes]]:
        """The function that draws a Report and a Timeline. It returns text, or an iterable of bytes."""
        made: Callable[[Any, Any], str | Iterable[bytes]] = getattr(
            import_module(f"{__package__}.{self.module}"), self.function
        )
        return made


VIEWS = {
    "html": View("html_page", "write one page that works offline: report.html", "report.html"),
    "trace": View("chrome_trace", "write trace.json.gz for Perfetto", "trace.json.gz"),
    "mermaid": View("gantt_text", "print the Gantt chart of a step for Markdown"),
    "json": View("html_page", "print every number as JSON", function="render_json"),
}
