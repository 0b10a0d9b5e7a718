"""Mark ranges for profilers; count a call's allocations and FLOPs.

A `record_function` costs 6 µs even when nobody profiles, so it is made only while torch's profiler runs. The flag that
says so is private; where it is missing, no range is made. Kineto's events of host allocations are private too.
Operators without a formula in torch's flop counter count no FLOPs: they are bound by memory. Causal attention counts
half, because its fused kernels compute half. Based on torch 2.11, 2.13 and 2.15: `autograd/profiler.py`,
`csrc/profiler/kineto_shim.h`, `utils/flop_counter.py`. Tested in tests/planner/test_measured.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from meshwise.torch_compat.dispatch import named_arguments

PREFIX = "meshwise."
# Nsight Systems sets its variable for processes that it starts. For others, the user sets MESHWISE_NVTX. HAS_NVTX
# depends on torch's build only, since `is_available` at import would break CUDA in later forks.
HAS_NVTX = bool(torch.version.cuda or torch.version.hip)
NVTX = HAS_NVTX and bool({"NSYS_PROFILING_SESSION_ID", "MESHWISE_NVTX"} & os.environ.keys())

is_profiled = functools.partial(getattr, profiler, "_is_profiler_enabled", False)
"""Return whether torch's profiler is running. This is called for every span, so it must cost next to nothing."""


def open_range(name: str) -> AbstractContextManager[Any] | None:
    """Begin the profiler range `meshwise.NAME`, and return it, for the caller to exit. Return None if no profiler is
    running."""
    if is_profiled():
        opened: AbstractContextManager[Any] = profiler.record_function(PREFIX + name)
    elif NVTX:
        opened = torch.cuda.nvtx.range(PREFIX + name)
    else:
        return None
    opened.__enter__()
    return opened


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
    """Send stderr to the null device: kineto prints a line at each start and end of a profile."""
    before, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def flops_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the number of multiplications and additions in a call of `operator` that returned `out`. Return 0 if torch
    has no formula for the operator."""
    formula = _formulas().get(operator.overloadpacket)
    if formula is None:
        return 0
    count = int(formula(*args, **kwargs, out_val=out))
    return count // 2 if named_arguments(operator, args, dict(kwargs)).get("is_causal") else count


@functools.cache
def _formulas() -> dict[Any, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry

    found, aten = dict(flop_registry), torch.ops.aten
    backward = found[aten._scaled_dot_product_flash_attention_backward]

    def of_cpu(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(backward(*args, out_val=out_val))  # `backward` uses only arguments that the CPU kernel also has

    found.setdefault(aten._scaled_dot_product_flash_attention_for_cpu, found[aten._scaled_dot_product_flash_attention])
    found.setdefault(aten._scaled_dot_product_flash_attention_for_cpu_backward, of_cpu)
    return found
