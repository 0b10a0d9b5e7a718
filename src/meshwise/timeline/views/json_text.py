"""Write the report as JSON: each number, and its display text.

Tested in tests/cli/test_report.py and tests/old.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from meshwise.spec.json_values import json_value
from meshwise.timeline.run_report import Report
from meshwise.timeline.timeline import Timeline


def render(report: Report, timeline: Timeline) -> str:
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
    """Return the function that formats numbers of a type such as `Seconds` or `Seconds | None`, or None for other
    types."""
    if get_origin(hint) is Annotated:
        write: Callable[[Any], str] = get_args(hint)[1]
        return write
    arms = [arm for arm in get_args(hint) if arm is not type(None)]
    return _unit(arms[0]) if len(arms) == 1 and type(None) in get_args(hint) else None
