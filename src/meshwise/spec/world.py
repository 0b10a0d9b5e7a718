"""Describe one process among the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """One rank of a run. `device` is the torch device word of this process: `cpu` or `cuda:0`.

    shares: how much of each batch the ranks take, in proportion; empty where all take the same.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: str = "cpu"
    shares: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of device, without its index: `cpu` or `cuda`."""
        return self.device.split(":")[0]
