"""Pack span rows as text, about two bytes a span.

The rows become columns of small differences, which are deflated.

Times are kept to the microsecond: start and end are rounded down, so spans that were nested stay nested.

Tested in tests/timeline/test_span_log.py.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwise.timeline.spans import WIDTH

VERSION = 2
"""Version of the format of a log. It covers the packing of spans and all other lines."""
Rows = NDArray[np.int64]
"""An array of shape (spans, WIDTH) with the columns code, start, end, step, bytes, collective."""
Column = NDArray[np.int64]
QUANTUM = 1000  # ns
LEVEL = 1  # of deflate: higher ones save 5 % and take twice as long


def as_rows(flat: Sequence[int]) -> Rows:
    """Convert the recorder's flat list of numbers to an array with one row per span."""
    return np.fromiter(flat, dtype=np.int64, count=len(flat)).reshape(-1, WIDTH)


def pack(rows: Rows) -> str:
    """Compress spans to text. Each row of `rows` is a span. `unpack` restores the columns of `rows`, with times rounded
    down to multiples of QUANTUM."""
    code, start, end, step, size, collective = rows.T
    start, end = start // QUANTUM, end // QUANTUM
    # A span begins about where the one before it ended; the others hardly change from span to span.
    gap = start - np.concatenate([[0], end[:-1]])
    columns = [code, gap, end - start, np.diff(step, prepend=0), size, np.diff(collective, prepend=0)]
    parts = [_column(column) for column in columns]
    head = bytes([width for width, _ in parts])
    return base64.b64encode(zlib.compress(head + b"".join(text for _, text in parts), LEVEL)).decode()


def unpack(text: str, count: int) -> tuple[Column, ...]:
    """Restore the columns of `count` spans: code, start, end, step, bytes, collective.

    Raises ValueError if the text is damaged.
    """
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from None
    widths = packed[:WIDTH]
    if len(packed) != WIDTH + sum(widths) * count or not set(widths) <= {1, 2, 4, 8}:
        raise ValueError(f"damaged: {len(packed)} bytes instead of {WIDTH + sum(widths) * count}")
    columns, at = [], WIDTH
    for width in widths:
        planes = np.frombuffer(packed, np.uint8, width * count, at).reshape(width, count)
        columns.append(np.ascontiguousarray(planes.T).view(f"<i{width}").reshape(count).astype(np.int64))
        at += width * count
    code, gap, long, step, size, collective = columns
    # start[i] = end[i-1] + gap[i] and end[i] = start[i] + long[i]
    end = np.cumsum(gap + long)
    return code, (end - long) * QUANTUM, end * QUANTUM, np.cumsum(step), size, np.cumsum(collective)


def _column(values: NDArray[np.int64]) -> tuple[int, bytes]:
    """Encode a column of integers. Returns the number of bytes per value, and the bytes.

    All first bytes of the values are written first, then all second bytes, and so on. Similar bytes are then neighbors,
    which compresses better.
    """
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    width = next(w for w in (1, 2, 4, 8) if -(1 << (8 * w - 1)) <= low and high < 1 << (8 * w - 1))
    narrow = np.ascontiguousarray(values.astype(f"<i{width}"))
    return width, narrow.view(np.uint8).reshape(len(values), width).T.tobytes()
