"""What one worker process gets: its device, its processor cores and its threads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerShare:
    """The part of a host that one worker uses.

    device: kind of device, `cpu` or `cuda`.
    index: which accelerator of the host, as the driver counts; None for a CPU worker.
    cores: processor cores that it is bound to; empty when it is not bound.
    threads: threads that its operators use.
    """

    device: str
    index: int | None
    cores: tuple[int, ...]
    threads: int

    @property
    def name(self) -> str:
        return self.device if self.index is None else f"{self.device}:{self.index}"


def core_ranges(cores: tuple[int, ...]) -> str:
    """`(0, 1, 2, 5)` as `0-2,5`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
