"""Write the report as JSON, or as one offline HTML page.

The JSON has each number and its display text. Everything on the page is drawn from the JSON that the page contains.

`html_page.js` builds the page; each displayed number names its path in the JSON (`data-path`), which also has its text.
plotly draws the charts: plotly-basic.min.js is plotly.js-basic-dist-min 4.1.1 of npm, unchanged (MIT).
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from meshwise.reports.run_report import NOT_MEMORY, Report
from meshwise.reports.spans import KINDS, LANES, Timeline
from meshwise.spec.json_values import json_value

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="page"><noscript>This page needs JavaScript; it loads nothing from any network.</noscript></main>
<script type="application/json" id="report">{report}</script>
<script>{plotly}</script>
<script>const {{ KINDS, LANES, NOT_MEMORY }} = {names};</script>
<script>{script}</script>
</body>
</html>
"""


def render(report: Report, timeline: Timeline) -> str:
    """Return the report as an HTML page of about 1.4 MB, of which the plotting library takes 1.2 MB."""
    return page_of(report_dict(report), f"{report.title}: {report.status}")


def page_of(values: Mapping[str, Any], title: str) -> str:
    """Return the HTML page for a report given as plain values. If the values have the key `plan`, the page shows a
    predicted step."""
    here = Path(__file__)
    return PAGE.format(
        title=html.escape(title),
        style=here.with_suffix(".css").read_text(encoding="utf-8"),
        report=json.dumps(values, separators=(",", ":")).replace("<", "\\u003c"),
        plotly=here.with_name("plotly-basic.min.js").read_text(encoding="utf-8").replace("</script", "<\\/script"),
        names=json.dumps({"KINDS": KINDS, "LANES": LANES, "NOT_MEMORY": NOT_MEMORY}),
        script=here.with_suffix(".js").read_text(encoding="utf-8"),
    )


def render_json(report: Report, timeline: Timeline) -> str:
    """Return the report as JSON text with all numbers, and the display text of each number."""
    return json.dumps(report_dict(report), indent=2)


def report_dict(report: Report) -> dict[str, Any]:
    """Convert a report to a dict for JSON. Non-finite numbers become None. The key `text` maps the path of each number
    to its display text."""
    return {"meshwise_report": 1, **json_value(report), "text": dict(texts_of(report))}


def texts_of(value: Any, hint: Any = None, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the display text of each number that has a unit. Paths look like `ranks/0/seconds/forward`."""
    write = _unit(hint)
    if write is not None:
        yield path, "unknown" if value is None else write(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name, of_field in _hints(type(value)).items():
            yield from texts_of(getattr(value, name), of_field, f"{path}/{name}".lstrip("/"))
    elif isinstance(value, Mapping | list) and get_args(hint):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from texts_of(item, get_args(hint)[-1], f"{path}/{key}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _unit(hint: Any) -> Callable[[Any], str] | None:
    """Return the function that formats numbers of a type such as `Seconds | None`. None for other types."""
    if get_origin(hint) is Annotated:
        write: Callable[[Any], str] = get_args(hint)[1]
        return write
    arms = [arm for arm in get_args(hint) if arm is not type(None)]
    return _unit(arms[0]) if len(arms) == 1 and type(None) in get_args(hint) else None
