"""Parse descriptions of devices: `4xcpu`, `8xcuda`, `cuda:0,1`, `all`.

`all` means every accelerator. A `WorkerSlot` has the device and cores of one worker.

This file only parses. `hardware/find.py` finds out whether the devices exist.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwise.spec.errors import UsageError, nearest

DEVICE_KINDS = ("cpu", "cuda", "xpu", "mps")
IN_WORDS = "all, 4xcpu, 2xcuda or cuda:0,1"
"""Examples of how an option names devices."""
STREAMED = ("cuda", "xpu")
"""The kinds of device that run asynchronously to the host, in streams (`torch.Stream`). Use their functions through
`torch.get_device_module(device)`, because a rehearsal may set `torch.accelerator` to a simulated device."""


@functools.cache  # cached, because it is called in every step
def has_streams(device: object) -> bool:
    """Return whether a device (`cuda:0`, `cpu`, a torch.device) runs asynchronously to the host, in streams."""
    return str(device).split(":")[0] in STREAMED


MOST_CPU_WORKERS = 256  # a typo such as 4000xcpu must not start 4000 processes


@dataclass(frozen=True)
class DeviceRequest:
    """The devices that the user asks for.

    kind: the kind of device. None means every accelerator.
    indices: the indices of the devices. None means the first `count` devices of the kind.
    """

    kind: str | None
    count: int | None = None
    indices: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.kind is None:
            return "all"
        if self.indices is not None:
            return f"{self.kind}:{','.join(map(str, self.indices))}"
        return f"{self.count}x{self.kind}"


def parse_devices(words: str) -> DeviceRequest:
    """Parse `all`, `4xcpu`, `cpu`, `2xcuda`, `cuda:0,1` or `cuda`. Raises UsageError for any other text."""
    text = words.strip().lower()
    if text == "all":
        return DeviceRequest(None)
    counted = re.fullmatch(r"(\d+)\s*x\s*([a-z]+)", text)
    if counted:
        return _counted(words, _known(words, counted[2]), int(counted[1]))
    indexed = re.fullmatch(r"([a-z]+):(\d+(?:,\d+)*)", text)
    if indexed:
        return _indexed(words, _known(words, indexed[1]), tuple(int(i) for i in indexed[2].split(",")))
    if re.fullmatch(r"[a-z]+", text):
        return DeviceRequest(_known(words, text), count=1)
    raise UsageError(
        f"--devices {words}: this does not name a device. Use a count (4xcpu, 2xcuda), indices (cuda:0,1) or all."
    )


def _counted(words: str, kind: str, count: int) -> DeviceRequest:
    if count < 1:
        raise UsageError(f"--devices {words}: a run needs at least one device. Use 1x{kind}.")
    if kind == "cpu" and count > MOST_CPU_WORKERS:
        raise UsageError(f"--devices {words}: one machine can start {MOST_CPU_WORKERS} CPU workers at most.")
    return DeviceRequest(kind, count=count)


def _indexed(words: str, kind: str, indices: tuple[int, ...]) -> DeviceRequest:
    if kind == "cpu":
        raise UsageError(f"--devices {words}: CPU workers have no indices. Use {max(len(indices), 1)}xcpu.")
    if len(set(indices)) != len(indices):
        raise UsageError(f"--devices {words}: a device is named twice. Use each index once.")
    return DeviceRequest(kind, indices=indices)


def _known(words: str, kind: str) -> str:
    if kind not in DEVICE_KINDS:
        hint = " Did you mean 'cuda'?" if kind == "gpu" else nearest(kind, (*DEVICE_KINDS, "all"))
        raise UsageError(
            f"--devices {words}: unknown kind of device '{kind}'.{hint} Use one of {', '.join(DEVICE_KINDS)}."
        )
    return kind


@dataclass(frozen=True)
class WorkerSlot:
    """The part of a host that one worker process gets: a device, processor cores and threads.

    device: kind of device, `cpu` or `cuda`.
    index: number of the accelerator on the host, in the driver's order; None for a CPU worker.
    cores: processor cores that the worker is bound to; empty if it is not bound.
    threads: number of threads that torch's operators use; 0 for torch's default.
    sees: indices of the accelerators that the worker sees; empty if it sees only its own.
    """

    device: str
    index: int | None
    cores: tuple[int, ...]
    threads: int
    sees: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.device if self.index is None else f"{self.device}:{self.index}"


def threads_in(environment: Mapping[str, str]) -> int:
    """Return the number in OMP_NUM_THREADS, or the first number if it is a list. Return 0 if it is not set."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def core_ranges(cores: tuple[int, ...]) -> str:
    """Format cores such as `(0, 1, 2, 5)` as `0-2,5`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
