"""A small writer of TOML: tables of texts, numbers, flags, lists and flat inline tables, in lines that people read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

Value = str | bool | int | float | Sequence["Value"] | Mapping[str, "Value"]
WIDTH = 120


def table_text(header: str, pairs: Mapping[str, Value]) -> str:
    """One table with its header (`[[device]]`, or an empty text at the top of a file), each key on a line."""
    lines = [header] if header else []
    lines += [_line(key, value) for key, value in pairs.items()]
    return "\n".join(lines) + "\n"


def key_text(key: str) -> str:
    """A key, in quotes where it must be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def value_text(value: Value) -> str:
    """A value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{key_text(key)} = {value_text(inner)}" for key, inner in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return f"[{', '.join(value_text(inner) for inner in value)}]"


def _line(key: str, value: Value) -> str:
    line = f"{key_text(key)} = {value_text(value)}"
    if len(line) <= WIDTH or isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        return line
    rows, row = [], ""
    for inner in value:
        cell = f"{value_text(inner)}, "
        if row and len(row) + len(cell) > WIDTH - 4:
            rows.append(row)
            row = ""
        row += cell
    return "\n".join([f"{key_text(key)} = [", *(f"    {row.rstrip()}" for row in [*rows, row]), "]"])


def _number(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)
    return text if set(text) & set(".e") else f"{text}.0"


def _string(text: str) -> str:
    """A basic string. JSON's escapes are TOML's too, save that TOML escapes DEL; lone surrogates cannot be written."""
    plain = text.encode("utf-8", "replace").decode("utf-8")
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")
