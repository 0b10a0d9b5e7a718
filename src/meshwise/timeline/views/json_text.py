"""Write the report as JSON text.

Tested in tests/cli/test_report.py and tests/old.
"""

from __future__ import annotations

import json

from meshwise.timeline.run_report import Report, report_dict
from meshwise.timeline.timeline import Timeline


def render(report: Report, timeline: Timeline) -> str:
    """Return the report as JSON text with all numbers, and the display text of each number."""
    return json.dumps(report_dict(report), indent=2)
