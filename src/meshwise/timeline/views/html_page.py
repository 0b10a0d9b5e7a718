"""Write the report as one HTML page that works offline.

Everything on the page is drawn from the JSON that the page contains.

`html_page.js` builds the page; each number shown names its path in the JSON (`data-path`), which has its text too. The
charts are plotly's: plotly-basic.min.js is plotly.js-basic-dist-min 4.1.1 of npm, unchanged (MIT).
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwise.timeline.run_report import NOT_MEMORY, Report
from meshwise.timeline.spans import KINDS, LANES
from meshwise.timeline.timeline import Timeline
from meshwise.timeline.views.json_text import report_dict

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
