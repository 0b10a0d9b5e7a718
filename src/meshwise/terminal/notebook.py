"""Show a notebook cell's value as a terminal would, in color."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console, RenderableType

Value = TypeVar("Value")
WIDTH = 110
"""Width of a line that fits into a notebook's cell, in characters."""
FORMAT = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.25">{code}</pre>'


@dataclass(frozen=True)
class Page:
    """An HTML page as the output of a notebook's cell."""

    html: str = field(repr=False)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.html)}" style="width: 100%; height: 85vh; border: 0"></iframe>'


def shown_by(kind: type[Value], view: Callable[[Value, int], RenderableType]) -> None:
    """Let notebooks show a value of the class `kind` as a terminal would print `view(value, width)`."""

    def text(value: Value) -> str:
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_jupyter=False)
        console.print(view(value, WIDTH))
        return console.export_html(code_format=FORMAT, inline_styles=True)

    setattr(kind, "_repr_html_", text)  # noqa: B010  # IPython asks for this name
