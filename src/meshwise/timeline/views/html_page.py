"""The report as one page that works offline: everything on it is drawn from the JSON that it carries.

`html_page.js` builds the page and formats numbers as `spec/units.py` does; each number in it says where in the JSON it
comes from (`data-path`). The charts are plotly's.
"""

from __future__ import annotations

import html
import json
from pathlib import Path

from meshwise.spec.errors import UsageError
from meshwise.timeline.run_report import Report, report_dict

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
<main id="page"><noscript>This page draws itself: it needs JavaScript, and nothing from any network.</noscript></main>
<script type="application/json" id="report">{report}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def page_html(report: Report) -> str:
    """The page, about 5 MB: the charts' script is in it. Raises UsageError where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError("the page needs plotly, which is not installed. Write: pip install plotly") from None
    beside = Path(__file__)
    return PAGE.format(
        title=html.escape(f"{report.title}: {report.status}"),
        style=beside.with_suffix(".css").read_text(encoding="utf-8"),
        report=json.dumps(report_dict(report), separators=(",", ":")).replace("<", "\\u003c"),
        plotly=get_plotlyjs().replace("</script", "<\\/script"),
        script=beside.with_suffix(".js").read_text(encoding="utf-8"),
    )
