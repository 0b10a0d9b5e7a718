"""Operations on two virtual devices beside the same torch calls written by hand for both, and beside others.

    python bench/arrays.py [--rounds 15] [--others]      --others: pip install "jax[cpu]" "dask[array]"

By hand: what somebody writes who knows where the two halves lie; the same kernels, one thread, in turn with ours in one
process. Goals: large ones within 5 %, an elementwise operation on two parts of 1,000 float32 at most 5 µs beyond.
Others: NumPy, Dask and JAX with two threads or devices, ours and torch with two threads. Also: the most memory that a
program of 1,000 operations on 20 million elements holds, beside torch on one device (goal 1.2 times), and what is left
after 10,000 operations (goal: nothing).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
import numpy as np
import torch
from keep import keep
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import meshwise as mw

ELEMENTS, SIDE, KEYS, WAVE = 4_000_000, 1024, 2_000_000, 1024
CALLS = 100  # of a small operation in a row
Parts = list[Tensor]


def chain(a: Parts, b: Parts) -> Parts:
    """sqrt(a) + 2 b."""
    return [torch.sqrt(x) + y * 2 for x, y in zip(a, b, strict=True)]


def summed(a: Parts) -> float:
    """The sum of both."""
    return float(a[0].sum() + a[1].sum())


def product(a: Parts, b: Tensor) -> Parts:
    """Rows of `a` times all of `b`, which lies on both."""
    return [x @ b for x in a]


def sorted_halves(a: Parts) -> Parts:
    """Both sorted, so that the first has the smaller ones: how many of each half are those, by bisection."""
    low, high = (x.sort().values for x in a)
    left, right, n = 0, len(low), len(low)
    while left < right:
        middle = (left + right) // 2
        if low[middle] < high[n - middle - 1]:
            left = middle + 1
        else:
            right = middle
    to_low, to_high = high[: n - left].clone(), low[left:].clone()  # over the link
    return [torch.cat([low[:left], to_low]).sort().values, torch.cat([to_high, high[n - left :]]).sort().values]


def transformed(a: Parts) -> Parts:
    """The transform of two dims of a matrix whose rows are halved: columns after a transpose, and back."""
    rows = [torch.fft.fft(x, dim=1) for x in a]
    half = rows[0].shape[1] // 2
    columns = [torch.cat([x[:, k * half : (k + 1) * half] for x in rows]) for k in range(2)]
    done = [torch.fft.fft(x, dim=0) for x in columns]
    own = rows[0].shape[0]
    return [torch.cat([x[k * own : (k + 1) * own] for x in done], 1) for k in range(2)]


def large_cases(xp: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name -> (ours, by hand)."""
    a, b = (xp.random.default_rng(k).random(ELEMENTS, dtype=xp.float32) for k in (1, 2))
    m = xp.random.default_rng(3).random((SIDE, SIDE), dtype=xp.float32)
    whole = m.reshard(xp.replicated())
    keys = xp.random.default_rng(4).random(KEYS, dtype=xp.float32)
    wave = xp.astype(xp.random.default_rng(5).random((WAVE, WAVE), dtype=xp.float32), xp.complex64)
    pa, pb, pm, pk, pw = (list(x.shards) for x in (a, b, m, keys, wave))
    one = whole.shards[0]
    return {
        "sqrt(a) + 2 b": (lambda: xp.sqrt(a) + b * 2, lambda: chain(pa, pb)),
        "sum": (lambda: float(a.sum()), lambda: summed(pa)),
        "matmul": (lambda: m @ whole, lambda: product(pm, one)),
        "sort": (lambda: xp.sort(keys), lambda: sorted_halves(pk)),
        "fft of two dims": (lambda: xp.fft.fftn(wave), lambda: transformed(pw)),
    }


def once(call: Callable[[], Any]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def others() -> dict[str, dict[str, float]]:
    """Median milliseconds by operation and library, with two threads or devices each."""
    import dask.array as da
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    torch.set_num_threads(2)
    xp = mw.array_namespace("2xcpu")
    draw = np.random.default_rng(0)
    table = {"a": draw.random(ELEMENTS, np.float32), "m": draw.random((SIDE, SIDE), np.float32)}
    table |= {"k": draw.random(KEYS, np.float32), "w": draw.random((WAVE, WAVE), np.float32).astype(np.complex64)}
    mesh = Mesh(np.array(jax.devices()), ("x",))
    placed = NamedSharding(mesh, PartitionSpec("x"))
    jaxes = {name: jax.device_put(value, placed) for name, value in table.items()}
    dasks = {name: da.from_array(value, chunks=(len(value) // 2, *value.shape[1:])) for name, value in table.items()}
    ours = {name: xp.asarray(value) for name, value in table.items()}
    tensors = {name: torch.from_numpy(value) for name, value in table.items()}
    right = ours["m"].reshard(xp.replicated())
    everyone = jax.device_put(table["m"], NamedSharding(mesh, PartitionSpec()))
    wait = jax.block_until_ready

    def columns(x: Any) -> Any:  # dask transforms along what is in one chunk
        return da.fft.fft(da.fft.fft(x, axis=1).rechunk((WAVE, WAVE // 2)), axis=0).compute()

    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "sqrt(a) + 2 a": {
            "NumPy": lambda: np.sqrt(table["a"]) + table["a"] * np.float32(2),
            "torch": lambda: torch.sqrt(tensors["a"]) + tensors["a"] * 2,
            "meshwise": lambda: xp.sqrt(ours["a"]) + ours["a"] * 2,
            "JAX": lambda: wait(jnp.sqrt(jaxes["a"]) + jaxes["a"] * 2),
            "Dask": lambda: (da.sqrt(dasks["a"]) + dasks["a"] * np.float32(2)).compute(),
        },
        "sum": {
            "NumPy": lambda: table["a"].sum(),
            "torch": lambda: float(tensors["a"].sum()),
            "meshwise": lambda: float(ours["a"].sum()),
            "JAX": lambda: float(jaxes["a"].sum()),
            "Dask": lambda: dasks["a"].sum().compute(),
        },
        "matmul": {
            "NumPy": lambda: table["m"] @ table["m"],
            "torch": lambda: tensors["m"] @ tensors["m"],
            "meshwise": lambda: ours["m"] @ right,
            "JAX": lambda: wait(jaxes["m"] @ everyone),
            "Dask": lambda: (dasks["m"] @ table["m"]).compute(),
        },
        "sort": {
            "NumPy": lambda: np.sort(table["k"]),
            "torch": lambda: tensors["k"].sort(),
            "meshwise": lambda: xp.sort(ours["k"]),
            "JAX": lambda: wait(jnp.sort(jaxes["k"])),
        },
        "fft of two dims": {
            "NumPy": lambda: np.fft.fftn(table["w"]),
            "torch": lambda: torch.fft.fftn(tensors["w"]),
            "meshwise": lambda: xp.fft.fftn(ours["w"]),
            "JAX": lambda: wait(jnp.fft.fftn(jaxes["w"])),
            "Dask": lambda: columns(dasks["w"]),
        },
    }
    found: dict[str, dict[str, list[float]]] = {}
    for operation, libraries in calls.items():
        found[operation] = {name: [] for name in libraries}
        for _ in range(12):
            for name, call in libraries.items():
                found[operation][name].append(once(call))
    medians = {op: {name: statistics.median(own[2:]) * 1e3 for name, own in row.items()} for op, row in found.items()}
    for operation, row in medians.items():
        print(f"{operation:16}", "  ".join(f"{name} {value:.1f} ms" for name, value in row.items()), flush=True)
    torch.set_num_threads(1)
    return medians


def held(program: Callable[[], object]) -> tuple[int, int]:
    """The most bytes that a program takes at once, and what it leaves, by the events of torch's allocator."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        program()
        gc.collect()
    taken = most = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    return most, taken


def steps(xp: Any, count: int, **placed: Any) -> None:
    """A program of `count` operations on 20 million elements."""
    x, y = (xp.full((20_000_000,), value, dtype=xp.float32, **placed) for value in (0.5, 2.0))
    for number in range(count // 4):
        x = x * y
        x = x + 1
        x = xp.sqrt(x)
        x = xp.where(x > number, x, y)


def seconds_of_one(call: Callable[[], Any]) -> float:
    """Seconds of one call, of `CALLS` in a row."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS


def small_cases(devices: Any = "2xcpu") -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name -> (the operation on arrays, the same torch calls on a list)."""
    xp = mw.array_namespace(devices)
    x, y = xp.ones(2000, dtype=xp.float32), xp.ones(2000, dtype=xp.float32)
    z = xp.ones(2000, dtype=xp.float64)
    xs, ys, zs = list(x.shards), list(y.shards), list(z.shards)
    return {
        "x + y": (lambda: x + y, lambda: [torch.add(a, b) for a, b in zip(xs, ys, strict=True)]),
        "xp.add(x, y)": (lambda: xp.add(x, y), lambda: [torch.add(a, b) for a, b in zip(xs, ys, strict=True)]),
        "x * y": (lambda: x * y, lambda: [torch.mul(a, b) for a, b in zip(xs, ys, strict=True)]),
        "xp.sqrt(x)": (lambda: xp.sqrt(x), lambda: [torch.sqrt(a) for a in xs]),
        "x * 2": (lambda: x * 2, lambda: [torch.mul(a, 2) for a in xs]),
        "2.5 * x": (lambda: 2.5 * x, lambda: [torch.mul(a, 2.5) for a in xs]),
        "1 - x": (lambda: 1 - x, lambda: [torch.sub(1, a) for a in xs]),
        "x + z (float64)": (lambda: x + z, lambda: [torch.add(a, b) for a, b in zip(xs, zs, strict=True)]),
        "x > 0.5": (lambda: x > 0.5, lambda: [torch.gt(a, 0.5) for a in xs]),
    }


def small(rounds: int) -> dict[str, Any]:
    """Microseconds of small operations, and beyond bare torch calls: medians, and quartiles of the difference."""
    found = {}
    for name, (ours, bare) in small_cases().items():
        pairs = [(seconds_of_one(ours), seconds_of_one(bare)) for _ in range(rounds)][rounds // 10 :]
        beyond = statistics.quantiles([(a - b) * 1e6 for a, b in pairs], n=4)
        found[name] = {"bare": statistics.median(b for _, b in pairs) * 1e6, "beyond": beyond[1], "quartiles": beyond}
        print(f"{name:16} {beyond[1]:5.2f} µs beyond {found[name]['bare']:5.2f} ({beyond[0]:.2f} to {beyond[2]:.2f})")
    return found


def memory() -> dict[str, Any]:
    """Beside torch, and what is left."""
    ours = held(lambda: steps(mw.array_namespace("2xcpu"), 40))[0]
    bare = held(lambda: steps(torch, 40))[0]
    xp = mw.array_namespace("2xcpu")
    x = xp.ones(1000)

    def many() -> None:
        for _ in range(2500):
            xp.sum(x * 2 + x[::2][:1])

    many()
    before = len(gc.get_objects())
    many()
    objects = len(gc.get_objects()) - before
    left = held(many)[1]
    print(f"memory: {ours / bare:.3f} of torch's; left after 10,000 operations: {left} bytes, {objects} objects")
    return {"ours": ours, "torch": bare, "ratio": ours / bare, "left": left, "objects": objects}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--others", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name, (ours, bare) in large_cases(mw.array_namespace("2xcpu")).items():
        pairs = [(once(ours), once(bare)) for _ in range(asked.rounds + 2)][2:]
        ratio = statistics.quantiles([one / other for one, other in pairs], n=4)
        found[name] = {
            "by hand, s": statistics.median(other for _, other in pairs),
            "ratio": ratio[1],
            "quartiles": ratio,
        }
        print(f"{name:16} {ratio[1]:.3f} of by hand ({ratio[0]:.3f} to {ratio[2]:.3f})", flush=True)
    result = {"small, µs": small(20 * asked.rounds), "large": found, "memory": memory(), "load": os.getloadavg()[0]}
    if asked.others:
        result["milliseconds with two threads"] = others()
    keep("arrays", result)


if __name__ == "__main__":
    main()
