"""Notice code that runs for the first time inside a call.

Python 3.12 and newer can call a function before each instruction. The call is turned off for an instruction that has
run in a proof or outside of calls that run apart, so old code costs nothing. Instructions are watched, not lines, since
one line may hold both branches. Not noticed: code made by torch.compile, and old code that gets new values.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch

from meshwise.training.engine.seeds import seed_generators
from meshwise.training.guards.own_collectives import is_of_program
from meshwise.training.whole.proof import Verdict
from meshwise.transfer.splitmix import mixed

HEARS = hasattr(sys, "monitoring")
TOOLS = (3, 4)  # tool ids of `sys.monitoring` that Python reserves for no kind of tool
Instructions = set[tuple[CodeType, int]]


class _Heard(threading.local):
    new: Instructions | None = None


_heard, _known, _codes = _Heard(), Instructions(), list[CodeType]()


@contextmanager
def new_code() -> Iterator[Instructions]:
    """Yield the set of the instructions that run for the first time in the `with` block, in this thread."""
    before, _heard.new = _heard.new, Instructions()
    try:
        yield _heard.new
    finally:
        _heard.new = before


def look_again(
    new: Instructions, verdict: Verdict, before: Any, prove: Callable[[Any], Verdict], device: str
) -> tuple[str | None, bool]:
    """Prove a call again after it ran new code, with its module's earlier attributes. Return why the call cannot run
    apart, or None, and whether the proof ran all of that code."""
    after, answers = verdict.attributes(), iter([answer for op, answer in verdict.answers if op])
    verdict.set_attributes(before)
    with new_code() as again:
        found = prove(lambda own, _: next(answers, own))
    verdict.set_attributes(after)
    _known.update(new, again)
    if found.draws and not verdict.draws:  # the call's draws have made the loop's stream differ between ranks
        verdict.draws = True
        seed_generators(device, mixed(torch.initial_seed(), verdict.calls, 0))
    return found.why or ("returns other tensors" if found.dims != verdict.dims else None), new <= again


def listen() -> None:
    """Count all code as new, and notice it from now on, if Python supports this and a tool id is free."""
    _known.clear()
    hear = _start()
    for code in _codes:
        hear(code, False)
        hear(code, True)


@functools.cache
def _start() -> Callable[..., None]:
    """Register callbacks. Return a function that turns them on or off for the instructions of some code."""
    monitoring: Any = getattr(sys, "monitoring", None)
    tool = next((n for n in TOOLS if monitoring.get_tool(n) is None), None) if monitoring else None
    if tool is None:
        return lambda *_: None
    events = monitoring.events

    def hear(code: CodeType, on: bool) -> None:
        monitoring.set_local_events(tool, code, events.INSTRUCTION if on else 0)

    def begins(code: CodeType, _: int) -> Any:
        if is_of_program(code.co_filename):
            _codes.append(code)
            hear(code, True)
        return monitoring.DISABLE

    def runs(code: CodeType, offset: int) -> Any:
        if _heard.new is None or (code, offset) in _known:
            return monitoring.DISABLE
        _heard.new.add((code, offset))
        return None

    monitoring.use_tool_id(tool, "meshwise")
    monitoring.register_callback(tool, events.PY_START, begins)
    monitoring.register_callback(tool, events.INSTRUCTION, runs)
    monitoring.set_events(tool, events.PY_START)
    return hear
