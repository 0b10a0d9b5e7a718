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

MEMORY = "[memory]"


def allocations_of(call: Callable[[], object]) -> list[int]:
    """Call `call()`, and return the size in bytes of each allocation of host memory meanwhile, in the order in which
    they happened. A release of memory appears as a negative number. The result of `call` is kept until the measurement
    has ended, so its release does not appear."""
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        given = call()
    results: Any = seen.profiler.kineto_results
    events = sorted(results.events(), key=lambda event: event.start_ns())
    del given
    return [event.nbytes() for event in events if event.name() == MEMORY]


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
