"""What a rank holds after the last step, for when its peers are gone: the run goes on from there, not from a save.

Under plain data parallelism every rank holds all of the state. A peer that dies ends a collective of the step in flight
with an error: until then nothing but buffers has changed, of which there is a copy.
Tested in tests/training/test_last_step.py and tests/faults/test_restarts.py.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from meshwise.compat.reducer import version
from meshwise.recovery.saving import Saver
from meshwise.recovery.state import RunState
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer.groups import divide_among
from meshwise.workers.environment import ATTEMPT
from meshwise.workers.failure import is_communication_error
from meshwise.workers.join import RankContext, leave


def can_rescue(plan: Plan, world: World) -> bool:
    """Whether each rank holds all of the state, and hears at once of a peer that is gone: gloo tells, NCCL does not."""
    divided = plan.parameters_divided or plan.state_divided
    alone = world.local_size == world.size  # one machine
    return world.size > 1 and plan.data == world.size and not divided and world.kind == "cpu" and alone


class LastStep:
    """The state of a run as it was after its last step. `keep` it after each."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._parameters = list(state.model.parameters())
        self._buffers = list(state.model.buffers())
        self._kept = [torch.empty_like(buffer) for buffer in self._buffers]
        self._where = (-1, -1, -1)
        self._versions: list[int] = []

    @torch.no_grad()
    def keep(self) -> None:
        """A step and all that belongs to it are done."""
        state = self._state
        self._where = state.epoch, state.index, state.step
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)
        self._versions = [version(p) for p in self._parameters]

    @torch.no_grad()
    def go_back(self) -> bool:
        """Whether the state is that of the last step again: not where the next one has changed parameters already."""
        state = self._state
        if state.step != self._where[2] or self._versions != [version(p) for p in self._parameters]:
            return False
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)
        state.epoch, state.index, state.step = self._where
        return True


def rescue(
    last: LastStep,
    error: BaseException,
    session: RankContext,
    folder: Path,
    save: Callable[[Saver], object],
    say: Callable[[str], None],
) -> None:
    """Where a collective failed because a peer is gone: write the state after the last step, on one of the ranks that
    are left. Leaves the process group. save: saves it with a Saver of this rank alone."""
    if session.gate.halted or not is_communication_error(error) or not last.go_back():
        return
    with contextlib.suppress(FileExistsError):
        mark = folder.parent / "workers" / f"rescued-{os.environ.get(ATTEMPT, '1')}"
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))  # the first of the ranks that are left
        leave()
        divide_among(None)
        saver = Saver(folder, replace(session.world, rank=0, size=1, local_rank=0, local_size=1), say)
        save(saver)
        saver.settle()
