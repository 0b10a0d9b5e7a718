"""What `copy` costs over `torch.Tensor.copy_`, and on GPUs whether it moves bytes as fast as the link does.

    python bench/copies.py [--rounds 400]

On the CPU: the same two tensors copied by both, interleaved, who goes first alternates; each sample is a batch of
calls, so that the clock weighs nothing. The claim is a difference of medians under 5 µs a call. On a GPU
(`bench/gpu.py` calls `on_gpus`): between the host and a device against torch's plain copies between CUDA events, on a
device against its memory, staged between two devices against the slower of its two legs measured alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch
from keep import keep, ratio_interval
from torch import Tensor

from meshwise.transfer.comm_log import comm_log
from meshwise.transfer.copy import copy

LIMIT = 5e-6
SHAPES = {"1 element": (1,), "4 KiB": (1024,), "64 KiB": (128, 128), "1 MiB": (512, 512), "16 MiB": (2048, 2048)}


def pairs(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds a call of both, interleaved."""
    calls = max(1, int(2e-4 / max(once(theirs), 1e-7)))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 20):
        for which in (0, 1) if number % 2 else (1, 0):
            run = (ours, theirs)[which]
            start = time.perf_counter()
            for _ in range(calls):
                run()
            took = (time.perf_counter() - start) / calls
            if number >= 20:  # the first ones warm caches
                times[which].append(took)
    return times


def cold(rounds: int) -> dict[str, Any]:
    """One call after 32 MiB went through the caches, where torch's own call is slower too."""
    src, dst = torch.randn(1024), torch.empty(1024)
    big, there = torch.randn(SHAPES["16 MiB"]), torch.empty(SHAPES["16 MiB"])
    runs: tuple[Callable[[], object], ...] = (lambda: copy(dst, src), lambda: dst.copy_(src))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            there.copy_(big)
            start = time.perf_counter()
            runs[which]()
            times[which].append(time.perf_counter() - start)
    return row(*times)


def once(run: Callable[[], object]) -> float:
    """Seconds of one call, roughly."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def difference_interval(ours: list[float], theirs: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Median of the paired differences in seconds, with its 95 % bootstrap interval."""
    differences = numpy.array(ours) - numpy.array(theirs)
    draw = numpy.random.default_rng(0).integers(0, len(differences), (draws, len(differences)))
    low, high = numpy.percentile(numpy.median(differences[draw], axis=1), [2.5, 97.5])
    return float(numpy.median(differences)), float(low), float(high)


def compared(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> dict[str, Any]:
    """One row of the result."""
    return row(*pairs(ours, theirs, rounds))


def row(us: list[float], them: list[float]) -> dict[str, Any]:
    """Medians of both and their difference and ratio, with intervals."""
    extra, ratio = difference_interval(us, them), ratio_interval(us, them)
    return {
        "torch µs": statistics.median(them) * 1e6,
        "ours µs": statistics.median(us) * 1e6,
        "extra µs": [value * 1e6 for value in extra],
        "ratio": list(ratio),
        "pairs": len(us),
    }


def on_cpu(rounds: int) -> dict[str, Any]:
    """Each size and way of calling."""
    found: dict[str, Any] = {}
    for size, shape in SHAPES.items():
        src, dst = torch.randn(shape), torch.empty(shape)
        found[size] = compared(lambda d=dst, s=src: copy(d, s), lambda d=dst, s=src: d.copy_(s), rounds)
        print(size, found[size], flush=True)
    big, there = torch.randn(SHAPES["16 MiB"]), torch.empty(SHAPES["16 MiB"])
    itself = compared(lambda: there.copy_(big), lambda: there.copy_(big), rounds)
    found["16 MiB, torch against itself"] = itself  # what its spread alone makes of a difference of zero
    found["4 KiB, caches cold"] = cold(rounds)
    src, dst = torch.randn(64, 64).t(), torch.empty(64, 64)
    found["64 x 64, from a transposed"] = compared(lambda: copy(dst, src), lambda: dst.copy_(src), rounds)
    found["64 x 64, into a transposed"] = compared(lambda: copy(src, dst), lambda: src.copy_(dst), rounds)
    small, there = torch.randn(1024), torch.empty(1024)
    with comm_log():
        found["4 KiB, with a log open"] = compared(lambda: copy(there, small), lambda: there.copy_(small), rounds)
    found["4 KiB, verified"] = compared(
        lambda: copy(there, small, verify=True), lambda: there.copy_(small), max(rounds // 10, 40)
    )
    return found


def event_seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median seconds by events on the current stream of `device`; every device is idle before each."""
    times = []
    for number in range(repeats + 3):
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            start.record()
            run()
            end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def rates(ours: Callable[[], object], plain: Callable[[], object], size: int, device: torch.device) -> dict[str, float]:
    """GB/s of both, in two turns each, so that a drift of clocks falls on both."""
    turns = [(event_seconds(ours, device), event_seconds(plain, device)) for _ in range(2)]
    us, them = (min(turn[which] for turn in turns) for which in (0, 1))
    return {"ours GB/s": size / us / 1e9, "plain GB/s": size / them / 1e9, "share": them / us}


def on_gpus(size: int = 1 << 30) -> dict[str, Any]:
    """Host and device, within a device, and staged between the first two devices, at `size` bytes."""
    device = torch.device("cuda", 0)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    here.random_()
    there, other = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    found: dict[str, Any] = {
        "host to device, pinned": rates(
            lambda: copy(there, here), lambda: there.copy_(here, non_blocking=True), size, device
        ),
        "device to host, pinned": rates(
            lambda: copy(here, there), lambda: here.copy_(there, non_blocking=True), size, device
        ),
        # Read and written: twice the bytes go through the memory.
        "within a device": rates(lambda: copy(other, there), lambda: other.copy_(there), 2 * size, device),
        "what small copies cost": on_gpu_calls(device),
    }
    copy(there, here, verify=True)
    copy(other, there, verify=True)
    if torch.cuda.device_count() > 1:
        found["staged between devices"] = staged_share(there, here, size)
    return found


def on_gpu_calls(device: torch.device) -> dict[str, Any]:
    """The host's time of a call that the device does not hold up."""
    a, b = (torch.zeros(1024, device=device) for _ in range(2))
    found = compared(lambda: copy(a, b), lambda: a.copy_(b), 100)
    torch.cuda.synchronize(device)
    return found


def staged_share(source: Tensor, host: Tensor, size: int) -> dict[str, float]:
    """Staged against the slower of its two legs: out of the source's device, into the target's."""
    target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    out = event_seconds(lambda: host.copy_(source, non_blocking=True), source.device)
    back = event_seconds(lambda: target.copy_(host, non_blocking=True), target.device)
    both = event_seconds(lambda: copy(target, source, path="staged"), target.device)
    copy(target, source, path="staged", verify=True)
    slower = max(out, back)
    return {"staged GB/s": size / both / 1e9, "slower leg GB/s": size / slower / 1e9, "share": slower / both}


def main() -> None:
    """Measure, print, keep."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rounds", type=int, default=400)
    rounds = words.parse_args().rounds
    torch.set_num_threads(1)
    result: dict[str, Any] = {"claim": "copy costs under 5 µs more than torch.Tensor.copy_", "cpu": on_cpu(rounds)}
    upper = {name: row["extra µs"][2] for name, row in result["cpu"].items()}
    warm = [name for name in upper if (name in SHAPES and name != "16 MiB") or "transposed" in name]
    # A copy of 16 MiB leaves cold caches behind; what a call costs then is measured apart, without the copy's spread.
    result["holds"] = {
        "in a loop": all(upper[name] < LIMIT * 1e6 for name in warm),
        "with cold caches": upper["4 KiB, caches cold"] < LIMIT * 1e6,
    }
    if torch.cuda.is_available():
        result["gpu"] = on_gpus()
    else:
        result["gpu"] = "not measured: torch sees no CUDA device here"
    keep("copies", result)


if __name__ == "__main__":
    main()
