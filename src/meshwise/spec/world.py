"""Describe one process among the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The environment variables that tell a process which of the processes of a run it is."""


@dataclass(frozen=True)
class World:
    """Describes this process as one of the processes of a run.

    device: the name of this process's torch device, such as `cpu` or `cuda:0`.
    shares: how much of each batch each rank computes, in proportion. Empty if all ranks compute the same.
    given: whether the launcher chose the device. If not, a run of one worker leaves models on the devices where the
        program has put them.
    chunks: whether a batch is divided as by `torch.chunk`. By default, the ranks' parts differ by at most one sample.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: str = "cpu"
    shares: tuple[float, ...] = ()
    given: bool = False
    chunks: bool = False

    @property
    def kind(self) -> str:
        """The kind of device, without its index: `cpu` or `cuda`."""
        return self.device.split(":")[0]
