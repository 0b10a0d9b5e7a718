"""Write the report as JSON text.

Tested in tests/cli/test_report.py and tests/old.
"""

from __future__ import annotations

import json

from meshwise.timeline.run_report import Report, report_dict
from meshwise.timeline.timeline import Timeline


def render(report: Report, timeline: Timeline) -> str:
    """Return a JSON text with every number of the report, and the text of each."""
    return json.dumps(report_dict(report), indent=2)
