"""Measure what a call allocates on the host, with torch's profiler.

Its events and their results are kineto's, which are not public. Read in torch 2.11, 2.13 and 2.15:
`csrc/profiler/kineto_shim.h`, `autograd/profiler.py`.

Tested in tests/rehearsal/test_measured.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocations_of(call: Callable[[], object]) -> list[tuple[int, int]]:
    """Call `call()`, and list how the allocated host memory changes while it runs: (bytes, address), in order, e.g.
    [(4096, a), (-4096, a)]. An allocation has positive bytes, and a release has negative bytes. The result of `call` is
    released only after the measurement."""
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        given = call()
    results: Any = seen.profiler.kineto_results
    found, ahead = [], list(results.experimental_event_tree())
    while ahead:
        event = ahead.pop()
        ahead += event.children
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.typed[1].alloc_size, event.typed[1].ptr))
    del given
    return [(size, address) for _, size, address in sorted(found, key=lambda one: one[0])]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect stderr to the null device in the block, because kineto prints a line at each start and end of a profile.
    (An environment variable could prevent this, but only if it is set before torch is imported.)"""
    with contextlib.ExitStack() as stack:
        try:
            before, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        except OSError:  # there is no stderr
            yield
            return
        stack.callback(os.close, before)
        stack.callback(os.dup2, before, 2)
        os.dup2(nothing, 2)
        os.close(nothing)
        yield
