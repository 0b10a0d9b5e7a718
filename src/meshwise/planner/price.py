"""Estimate the time of one operator on one device.

The time in seconds, called a price, is a measurement on this device, or else comes from a roofline model with the
catalog's figures.

The roofline model takes the longer of two times: to compute the FLOPs, or to read and write the bytes. FLOPs are
computed at the rate of a matmul of this shape. This rate depends on the fraction of the peak that was reached, and on
how tiles fill the multiprocessors. If a figure is unknown, no time is given.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwise.hardware.catalog import CatalogPart, achievable, nominal_of, part, reached
from meshwise.planner.constants import FIGURES, TILES, Figure
from meshwise.planner.operators import Product, product_of, sort_of
from meshwise.planner.work import Copy, Operation
from meshwise.spec.machine import HOST, Device, Machine, Matmul, link_between
from meshwise.spec.timings import seconds_at

MEASURED, CATALOG, MODEL = "measured", "catalog", "model"
COMPUTE, MEMORY, COMMUNICATION, LAUNCH = "compute", "memory", "communication", "launch"
FACTORS = (COMPUTE, MEMORY, COMMUNICATION, LAUNCH)
"""Kinds of estimated times. If one time of a kind is too long, the others tend to be too long as well."""
EXACT = Figure(1.0, 1.0, "")
FUSED = ("elementwise", "reduction", "batch-norm", "dropout")
"""Kinds of operators (see `sort_of`) that compilation fuses."""
Known = Callable[[Operation], float | None]
"""Returns the measured seconds of an operator at its shapes, or None if it was not measured on this device."""


@dataclass(frozen=True, slots=True)
class Priced:
    """An estimated time in seconds, called a price."""

    seconds: float
    low: float
    high: float
    origin: str
    factor: str


def priced(seconds: float, spread: float, origin: str, factor: str) -> Priced:
    """Return an estimated time with the interval from `seconds / spread` to `seconds * spread`."""
    return Priced(seconds, seconds / spread, seconds * spread, origin, factor)


def times(price: Priced, factor: float) -> Priced:
    """Return an estimated time multiplied by a factor, together with its interval."""
    if factor == 1.0:
        return price
    return replace(price, seconds=price.seconds * factor, low=price.low * factor, high=price.high * factor)


def kernel_seconds(operation: Operation, device: Device, known: Known | None = None) -> Priced | None:
    """Estimate the time of one operator on a device.
    Return None if a figure of the device is unknown."""
    seconds = known(operation) if known is not None else None
    sort = sort_of(operation)
    factor = COMPUTE if sort in ("matmul", "attention", "convolution", "recurrent") else MEMORY
    if seconds is not None:
        return priced(seconds, FIGURES["measured.operator"].spread, MEASURED, factor)
    if device.kind == "cpu":
        return _on_processor(operation, device, sort)
    bytes_time = _bytes_seconds(operation, device, sort)
    if bytes_time is None or factor == MEMORY:
        return bytes_time
    flops_time, floor = _flops_seconds(operation, device, sort), FIGURES["kernel"].value
    if flops_time is None or bytes_time.seconds > flops_time.seconds + floor:
        return bytes_time if flops_time is not None else None
    if sort == "convolution" and operation.layout != "channels_last":
        floor += _transposing(operation, device)
    ends = (flops_time.seconds + floor, flops_time.low + floor, flops_time.high + floor)
    return Priced(*ends, flops_time.origin, COMPUTE)


def fused_share(operation: Operation) -> float:
    """Return which fraction of its usual time an operator takes in a compiled block."""
    return FIGURES["compile.memory"].value if sort_of(operation) in FUSED else 1.0


def launch_seconds(device: Device, phase: str = "") -> Priced:
    """Estimate how long the host takes to launch an operator on an accelerator."""
    if device.kind == "cpu":
        return Priced(0.0, 0.0, 0.0, MEASURED, LAUNCH)
    figure = FIGURES["launch"]
    seconds, origin = (figure.value, MODEL) if device.launch is None else (device.launch, MEASURED)
    if not phase:
        return priced(seconds, figure.spread, origin, LAUNCH)
    program = FIGURES[f"program.{phase}"]
    return priced(seconds * program.value, joint(figure, program).spread, MODEL, LAUNCH)


def copy_seconds(copy: Copy, device: Device, machine: Machine) -> Priced | None:
    """Estimate the time of a copy between an accelerator and pinned memory of its host."""
    ends = (HOST, device.name) if copy.to == "device" else (device.name, HOST)
    link = link_between(machine, *ends)
    if link is None:
        return None
    if "pinned" in link.timings:
        seconds = seconds_at(link.timings["pinned"], max(copy.size, 1))
        return priced(seconds, FIGURES["measured.copy"].spread, MEASURED, COMMUNICATION)
    nominal, generation = nominal_of(link)
    if nominal is None:
        return None
    share = reached(link.kind, generation, "to") or reached("pcie", generation, "to")
    rate = nominal * (share or FIGURES["nccl.unknown"].value)
    seconds = FIGURES["kernel"].value + copy.size / rate
    return priced(seconds, FIGURES["nccl.large"].spread, CATALOG if share else MODEL, COMMUNICATION)


def _bytes_seconds(operation: Operation, device: Device, sort: str) -> Priced | None:
    """Estimate the time to read and write an operator's bytes in an accelerator's memory."""
    moved = operation.read + operation.written
    group = sort if f"memory.{sort}" in FIGURES else "elementwise"
    share, floor = FIGURES[f"memory.{group}"], FIGURES["kernel"]
    if device.memory_rate is not None:
        rate, spread, origin = device.memory_rate, share.spread, MEASURED
    elif device.memory_bandwidth is not None:
        copy = FIGURES["memory.copy"]
        rate, spread, origin = device.memory_bandwidth * copy.value, joint(share, copy).spread, CATALOG
    else:
        return None
    seconds = moved / (rate * share.value)
    total = floor.value + seconds
    both = (floor.value * floor.spread + seconds * spread) / total
    return priced(total, both, origin, MEMORY)


def _flops_seconds(operation: Operation, device: Device, sort: str) -> Priced | None:
    """Estimate the time to compute an operator's FLOPs on an accelerator."""
    if not operation.dtypes:
        return None
    dtype, known = operation.dtypes[0], part(device.part)
    if dtype in ("fp32", "tf32") and (sort == "convolution" or dtype == "tf32"):
        dtype = "tf32" if "tf32" in {*device.peak, *device.best_rates} else "fp32"
    product = product_of(operation)
    flops = operation.flops or (product.flops if product else 0)
    if flops == 0:
        return Priced(0.0, 0.0, 0.0, MODEL, COMPUTE)
    if sort == "attention":
        return _attention(operation, device, dtype, known)
    name = sort if sort in ("convolution", "recurrent") else "matmul"
    if name == "convolution" and f"convolution.{dtype}" in FIGURES:
        name = f"convolution.{dtype}"
    share = EXACT if name == "matmul" else FIGURES[name]
    if product is None:
        share = joint(share, FIGURES["matmul.shape-unknown"])
    elif product.misaligned:
        share = joint(share, FIGURES["matmul.misaligned"])
    multiprocessors = known.multiprocessors if known else None
    filled = tile_share(product, multiprocessors) if product else 1.0
    products = tuple(one for one in device.matmuls if one.dtype == dtype)
    if products:
        rate = _measured_rate(products, flops, multiprocessors) * filled
        spread = joint(share, FIGURES["measured.matmul"]).spread
        return priced(flops / (rate * share.value), spread, MEASURED, COMPUTE)
    best = _best_rate(device, dtype, known)
    if best is None:
        return None
    both = joint(best, share)
    return priced(flops / (both.value * filled), both.spread, both.source, COMPUTE)


def _best_rate(device: Device, dtype: str, known: CatalogPart | None) -> Figure | None:
    """Return the FLOP/s of a large matmul in `dtype`. Its source is `catalog` or `model`."""
    peak = device.peak.get(dtype)
    if peak is None:
        return None
    line = known.architecture if known else ""
    typical = FIGURES.get(f"matmul.{line}") or FIGURES["matmul"]
    if other := FIGURES.get(f"matmul.{dtype}"):
        typical = joint(typical, other)
    found = device.achievable.get(dtype)
    if found is None and known is not None and (share := achievable(known, dtype) or achievable(known, "bf16")):
        found = share
    if found is not None:
        return Figure(peak * found * typical.value, typical.spread, CATALOG)
    unknown = FIGURES["matmul.unknown-share"]
    return Figure(peak * unknown.value * typical.value, joint(unknown, typical).spread, MODEL)


def _transposing(operation: Operation, device: Device) -> float:
    """Return the seconds to convert images to the layout of tensor cores, and results back."""
    narrow = operation.dtypes[0] in ("bf16", "fp16") or "tf32" in {*device.peak, *device.best_rates}
    rate = device.memory_rate or FIGURES["memory.copy"].value * (device.memory_bandwidth or 0.0)
    if not narrow or not rate:
        return 0.0
    return 2 * (operation.read + operation.written) / (rate * FIGURES["memory.transpose"].value)


def _attention(operation: Operation, device: Device, dtype: str, known: CatalogPart | None) -> Priced | None:
    """Estimate the time of fused attention from its FLOPs, at a fraction of the peak rate."""
    peak = device.peak.get(dtype)
    if peak is None:
        return None
    line = known.architecture if known else ""
    line = {"ada": "ampere"}.get(line, line)
    way = "backward" if "backward" in operation.name else "forward"
    share = FIGURES.get(f"attention.{line}.{way}") or FIGURES[f"attention.other.{way}"]
    for kind in ("cudnn", "efficient", "flash1"):
        if kind in operation.name:
            share = joint(share, FIGURES[f"attention.{kind}"])
    value = share.value
    query = next((shape for shape in operation.shapes if len(shape) == 4), None)
    if query is not None and known is not None and known.multiprocessors:
        value *= _filled(math.prod(query[:2]) * math.ceil(query[2] / 128), known.multiprocessors)
    return priced(operation.flops / (peak * value), share.spread, MODEL, COMPUTE)


def _filled(blocks: int, multiprocessors: int) -> float:
    """Return the average fraction of busy multiprocessors while `blocks` equal thread blocks run in waves."""
    return max(blocks, 1) / (math.ceil(max(blocks, 1) / multiprocessors) * multiprocessors)


@lru_cache(maxsize=65_536)
def tile_share(product: Product, multiprocessors: int | None) -> float:
    """Return the rate of a matrix product of this size, as a fraction of the rate of a very large product."""
    if not multiprocessors:
        return 1.0
    fill = FIGURES["matmul.fill"].value
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = product.batch * math.ceil(product.m / rows) * math.ceil(product.n / columns)
        splits = 1
        while True:
            waves = math.ceil(tiles * splits / multiprocessors)
            steps = math.ceil(product.k / splits) + fill
            done = waves * multiprocessors * rows * columns * steps / rate
            best = max(best, product.batch * product.m * product.n * product.k / done)
            splits *= 2
            if tiles * splits > multiprocessors or product.k / splits < 512:
                break
    return best


def _measured_rate(products: Sequence[Matmul], flops: int, multiprocessors: int | None) -> float:
    """Return the FLOP/s of a matmul that has `flops` FLOPs and fills the device."""
    sizes = {2 * p.m * p.n * p.k: p.rate / tile_share(Product(1, p.m, p.n, p.k), multiprocessors) for p in products}
    return _between(sorted(sizes.items()), flops)


def _between(table: Sequence[tuple[int, float]], at: float) -> float:
    """Interpolate a table of (x, y) at x = `at` on logarithmic axes."""
    place = bisect_left(table, (at,))
    if place == 0 or place == len(table):
        return table[min(place, len(table) - 1)][1]
    (low, first), (high, second) = table[place - 1], table[place]
    share = math.log(at / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(first) + share * math.log(second))


def _on_processor(operation: Operation, device: Device, sort: str) -> Priced | None:
    """Estimate the time of an operator on a CPU from measured products or the memory rate."""
    if device.memory_rate is None:
        return None
    bytes_seconds = (operation.read + operation.written) / device.memory_rate
    moved = priced(bytes_seconds, FIGURES["cpu.memory"].spread, MODEL, MEMORY)
    product = product_of(operation)
    flops = operation.flops or (product.flops if product else 0)
    longest: Priced = moved
    if flops and sort in ("matmul", "attention", "convolution", "recurrent"):
        dtype = operation.dtypes[0] if operation.dtypes else ""
        table = sorted({2 * p.m * p.n * p.k: p.rate for p in device.matmuls if p.dtype == dtype}.items())
        if not table:
            return None
        figure = FIGURES[f"cpu.{sort}"]
        computed = priced(flops / (_between(table, flops) * figure.value), figure.spread, MODEL, COMPUTE)
        longest = max(computed, moved, key=lambda one: one.seconds)
    call = device.launch or 0.0
    return Priced(longest.seconds + call, longest.low + call, longest.high + call, longest.origin, longest.factor)


def joint(one: Figure, other: Figure) -> Figure:
    """Return the product of two figures with independent errors."""
    spread = math.exp(math.hypot(math.log(one.spread), math.log(other.spread)))
    return Figure(one.value * other.value, spread, one.source)
