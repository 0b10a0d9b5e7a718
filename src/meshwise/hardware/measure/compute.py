"""Measure one device: matrix products, memory rate, launch cost.

Products are measured by dtype and shape.

The method is that of mamf-finder (stas00/ml-engineering). The data is random, the cache is flushed between repeats, and
the median is reported. The best rate over all shapes is the achievable rate. Products are timed at growing shapes until
the budget is spent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

from meshwise.hardware.measure.timing import held_seconds, host_seconds, repeat
from meshwise.hardware.memory import free_bytes
from meshwise.spec.machine import Matmul
from meshwise.torch_compat.driver import computes_bf16

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Sizes m of square matrix products (m, m, m), ascending. Each is followed by (m, 4m, m), as in a transformer."""
FLUSH_BYTES = 256 << 20  # larger than the last-level cache of any device in the catalog
COPY_BYTES = {"cpu": 256 << 20}  # bytes copied to measure memory bandwidth: four times a usual CPU cache, else 1 GiB
LAUNCHES = 1000


def matmuls(device: torch.device, budget: float, dtypes: tuple[str, ...] | None = None) -> Iterator[Matmul]:
    """Measure matrix products of growing shapes, and yield each result."""
    names = dtypes if dtypes is not None else dtypes_of(device)
    for name in names:
        end = time.perf_counter() + budget / len(names)
        last = 0.0
        for m, n, k in ((size, size * wide, size) for size in SHAPES for wide in (1, 4)):
            left = end - time.perf_counter()
            # The next product takes 2 to 8 times as long as the last one, and runs at least 5 times.
            if left < 40 * last or not _fits(device, name, m, n, k):
                break
            last = _product_seconds(device, name, (m, n, k), min(left / 4, 0.3))
            yield Matmul(name, m, n, k, last)


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """Return the names of the dtypes in which the device can multiply matrices. tf32 is only for NVIDIA devices."""
    tf32 = device.type == "cuda" and not torch.version.hip
    return tuple(name for name in DTYPES if (name != "tf32" or tf32) and _computes(device, DTYPES[name]))


def memory_rate(device: torch.device, budget: float) -> float:
    """Return the bytes per second of a copy inside the device's memory, counting both the bytes read and the bytes
    written."""
    size = min(COPY_BYTES.get(device.type, 1 << 30), free_bytes(device) // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds, _ = repeat(partial(held_seconds, lambda: target.copy_(source), device), budget)
    return 2 * size / median(seconds)


def launch_seconds(device: torch.device) -> float:
    """Return the seconds that the host needs to launch a kernel, measured with many small kernels in a row."""
    tensor = torch.zeros(1, device=device)
    host_seconds(lambda: tensor.add_(1), device, LAUNCHES // 10)
    return median(host_seconds(lambda: tensor.add_(1), device, LAUNCHES) for _ in range(5))


def _product_seconds(device: torch.device, name: str, shape: tuple[int, int, int], budget: float) -> float:
    """Return the median seconds of a product whose matrices come from memory, not the cache."""
    dtype, (m, n, k) = DTYPES[name], shape
    left, right = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=dtype, device=device)
    flush = None if device.type == "cpu" else torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def timed(batch: int) -> float:
        if flush is not None:
            flush.zero_()
        return held_seconds(lambda: torch.mm(left, right, out=out), device, batch)

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        return median(repeat(timed, budget, single=True)[0])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _computes(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        one = torch.ones(8, 8, dtype=dtype, device=device)
        torch.mm(one, one)
    except RuntimeError:
        return False
    return dtype != torch.bfloat16 or computes_bf16(device)


def _fits(device: torch.device, name: str, m: int, n: int, k: int) -> bool:
    size = DTYPES[name].itemsize
    return (m * k + k * n + m * n) * (size + 4) < free_bytes(device) // 2  # + 4, since randn first makes fp32 numbers
