"""Warn of numbers that become wrong on several ranks or after resumes.

These are batch sizes that the source divides by the number of ranks, epochs that are counted from 0, and counters and
sums of a loop that resumes inside an epoch.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator
from typing import Any

from meshwise.spec.units import plural
from meshwise.spec.user_code import user_frame, user_place
from meshwise.training.slips.user_source import Source, name_of, sources_in

DIVIDED = (
    "{place}: this loader's batch_size is {whole} divided by the number of ranks, but for mw.distribute it is the "
    "batch size of all ranks together. Write batch_size={whole}."
)
RESUMED = (
    "{place}: the loop resumes with batch {batch} of its epoch, so its counters and sums restart there. Count with "
    "enumerate(loader, loader.start), and keep sums in a dict that is passed to mw.checkpoint(…, extra=state)."
)
UNREAD = (
    "the restored state has {epochs}, but the program has not read saved.epoch. A loop over all epochs, such as "
    "range(4), trains too many. Write for epoch in range(saved.epoch, …)."
)
RANKS = re.compile(r"(?i)world_size|device_count")


def says_divided(sources: Iterable[Source] | None = None) -> Iterator[str]:
    """Yield a warning for each loader whose batch size is divided by the number of ranks.

    sources: where to look. By default, the file of the user that calls this.
    """
    frame = user_frame()
    calling = sources_in(frame.f_code.co_filename, frame.f_globals) if frame else ()
    for source in calling if sources is None else sources:
        for call in source.calls():
            if not name_of(call).endswith("DataLoader"):
                continue
            sizes = [each.value for each in call.keywords if each.arg == "batch_size"] or call.args[1:2]
            for whole in [whole for size in sizes for whole in _dividends(source, source.value(size))][:1]:
                yield DIVIDED.format(place=source.place(call.lineno), whole=ast.unparse(whole))


def _dividends(source: Source, size: ast.expr) -> Iterator[ast.expr]:
    """Yield `n` if a size is `n` divided by `world_size` or by another expression for the number of ranks."""
    nodes = [node for node in ast.walk(size) if isinstance(node, ast.BinOp)]
    rounded = any(isinstance(node.op, ast.Mult) for node in nodes)  # as in n // ranks * ranks, which only rounds n
    for node in nodes if not rounded else ():
        if isinstance(node.op, ast.FloorDiv | ast.Div) and RANKS.search(ast.unparse(source.value(node.right))):
            yield node.left


def says_unread(epochs: int, extra: Any) -> str:
    """Return a warning for a resumed program that has read neither epoch nor step of its restored state."""
    if not epochs or (isinstance(extra, dict) and any(re.search("epoch|step", str(name).lower()) for name in extra)):
        return ""  # the program may keep its own counter
    return UNREAD.format(epochs=plural(epochs, "finished epoch"))


def says_resumed(start: int) -> str:
    """Return a warning if the user's loop resumes inside an epoch, after `start` batches, and does not count them."""
    frame = user_frame()
    if frame is None or ".start" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        return ""
    return RESUMED.format(place=user_place(frame), batch=start + 1)
