"""The views of a report: each is a file of this folder with a function `render(report, timeline)`, and a line here.

The command line has an option for each: `--html` writes report.html, `--mermaid` prints.

Tested in tests/cli/test_report.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshwise.timeline.run_report import Report
from meshwise.timeline.timeline import Timeline
from meshwise.timeline.views import chrome_trace, html_page, json_text, mermaid, openmetrics, tensorboard


@dataclass(frozen=True)
class View:
    """help: of its option. render: its content, as text or pieces of bytes. file: its name, "" where it is printed."""

    help: str
    render: Callable[[Report, Timeline], str | Iterable[bytes]]
    file: str = ""


EVENTS = "tensorboard/report/events.out.tfevents.report"
VIEWS = {
    "html": View("write one page that works offline: report.html", html_page.render, "report.html"),
    "trace": View("write trace.json.gz for Perfetto", chrome_trace.render, "trace.json.gz"),
    "openmetrics": View("write metrics.prom for Prometheus", openmetrics.render, "metrics.prom"),
    "tensorboard": View("write TensorBoard events", tensorboard.render, EVENTS),
    "mermaid": View("print the Gantt chart of a step for Markdown", mermaid.render),
    "json": View("print every number as JSON", json_text.render),
}
