"""Copies that one process makes: host to device and back, device to device, both ways at once, one to all, all to one.

Each path is timed by size, and then checked: the source is filled with data that depends on the path and the offset,
copied once more, and every byte is compared where it arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from meshwise.machine.measure.result import PathResult
from meshwise.machine.measure.timing import Sample, repeat, wait
from meshwise.spec.timings import fitted
from meshwise.spec.units import bytes_text
from meshwise.transfer.pattern import fill, first_difference

Move = Callable[[Tensor, Tensor, str], None]
"""Copies the second tensor into the first by a path (`pinned`, `pageable`, `peer`, `staged`), in stream order."""


@dataclass(frozen=True)
class Path:
    """One path that is measured: legs are (source, target) names of copies that run at once, all of the same size."""

    operation: str
    source: str
    target: str
    path: str
    legs: tuple[tuple[str, str], ...]


def copy_paths(devices: Sequence[str], peers: Callable[[str, str], bool]) -> list[Path]:
    """All paths of these devices of one host. peers: whether the first can read the second's memory directly."""
    found = []
    for device in devices:
        for how in ("pinned", "pageable"):
            found.append(Path("copy", "host", device, how, (("host", device),)))
            found.append(Path("copy", device, "host", how, ((device, "host"),)))
        found.append(Path("copy both ways", "host", device, "pinned", (("host", device), (device, "host"))))
    for source, target in permutations(devices, 2):
        for how in ("peer", "staged") if peers(source, target) else ("staged",):
            found.append(Path("copy", source, target, how, ((source, target),)))
    for source, target in permutations(devices, 2):
        if source < target:
            how = "peer" if peers(source, target) else "staged"
            found.append(Path("copy both ways", source, target, how, ((source, target), (target, source))))
    first, *others = devices
    if others:
        how = "peer" if all(peers(first, other) for other in others) else "staged"
        found.append(Path("one-to-all", first, "all", how, tuple((first, other) for other in others)))
        found.append(Path("all-to-one", "all", first, how, tuple((other, first) for other in others)))
    return found


def measure_copy(
    path: Path, sizes: Sequence[int], budget: float, move: Move, place: Callable[[str], str]
) -> PathResult:
    """Time one path at growing sizes for about `budget` seconds, then see whether its bytes arrive.

    place: the torch device of a name. A size that would take more than what is left of the budget is left out.
    """
    end = time.perf_counter() + budget
    tensors = [_ends(leg, path.path, max(sizes), place) for leg in path.legs]
    clocked = torch.device("cpu") if len(path.legs) > 1 else _clocked(path.legs[0], place)
    measured: list[Sample] = []
    note = ""
    for at, size in enumerate(sizes):
        cut = [(source[:size], target[:size]) for source, target in tensors]

        left = end - time.perf_counter()
        if measured and left < 7 * measured[-1].seconds * size / sizes[at - 1]:
            note = f"{bytes_text(size)} and more were left out: the time for this path was over"
            break
        measured.append(repeat(_call(path.path, cut, move), clocked, left / (len(sizes) - at)))
    timings = fitted(
        sizes[: len(measured)], [m.seconds for m in measured], [m.p95 for m in measured], [m.p99 for m in measured]
    )
    wrong = check_path(path, tensors, move)
    return PathResult(
        path.operation,
        path.source,
        path.target,
        path.path,
        len({end for leg in path.legs for end in leg}),
        timings,
        wrong,
        note,
    )


def check_path(path: Path, tensors: Sequence[tuple[Tensor, Tensor]], move: Move) -> str | None:
    """Where bytes did not arrive as they were sent, in words; None when all did."""
    for key, (source, target) in enumerate(tensors):
        fill(source, key + 1)
        fill(target, -key - 1)  # what an earlier copy left must not pass for this one's
    for source, target in tensors:
        move(target, source, path.path)
    for tensor in (tensor for pair in tensors for tensor in pair):
        wait(tensor.device)
    for key, (_, target) in enumerate(tensors):
        at = first_difference(target, key + 1)
        if at is not None:
            source_name, target_name = path.legs[key]
            return (
                f"{source_name} -> {target_name}, {path.path}: byte {at:,} of {target.numel():,} is not what was sent"
                + (f" ({path.operation})" if path.operation != "copy" else "")
            )
    return None


def _ends(leg: tuple[str, str], how: str, size: int, place: Callable[[str], str]) -> tuple[Tensor, Tensor]:
    source, target = (_buffer(end, how, size, place) for end in leg)
    return source, target


def _buffer(end: str, how: str, size: int, place: Callable[[str], str]) -> Tensor:
    if end == "host":
        return torch.zeros(size, dtype=torch.uint8, pin_memory=how == "pinned")
    return torch.zeros(size, dtype=torch.uint8, device=place(end))


def _clocked(leg: tuple[str, str], place: Callable[[str], str]) -> torch.device:
    """The device whose clock times a copy: its source's, in whose stream torch copies; not the host's."""
    return torch.device(place(next(end for end in leg if end != "host")))


def _call(how: str, legs: Sequence[tuple[Tensor, Tensor]], move: Move) -> Callable[[], None]:
    """Copies all legs: a single one in the current streams, several at once, each in streams of its own."""
    if len(legs) == 1:
        ((source, target),) = legs
        if how == "staged" and source.is_cuda and target.is_cuda:
            return lambda: _staged_alone(target, source, move)
        return lambda: move(target, source, how)
    cuda = sorted({tensor.get_device() for leg in legs for tensor in leg if tensor.is_cuda})
    streams = [[torch.cuda.Stream(index) for index in cuda] for _ in legs]

    def at_once() -> None:
        for (source, target), own in zip(legs, streams, strict=True):
            with ExitStack() as stack:
                for stream in own:
                    stack.enter_context(torch.cuda.stream(stream))
                move(target, source, how)
        for index in cuda:
            torch.cuda.synchronize(index)

    return at_once


def _staged_alone(target: Tensor, source: Tensor, move: Move) -> None:
    """The clock is in the source's stream, which a staged copy frees after its first leg: it waits for the second."""
    move(target, source, "staged")
    torch.cuda.current_stream(source.device).wait_stream(torch.cuda.current_stream(target.device))
