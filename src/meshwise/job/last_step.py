"""Keep a rank's latest state, so that a run survives losing it.

The run then continues without going back to a saved state.

If each rank holds the whole state, one of the surviving ranks writes it to disk, and nothing is copied in advance.
Otherwise each rank copies its part of the state after a step into memory that its launcher holds. The launcher then
still has the part of a lost rank.

    --redundancy 1    copy after every step
    (default)         copy after every n-th step, if there is plenty of memory; n is the smallest number of steps for
                      which copying costs at most 1 % of the time
    --redundancy 0    never copy; the last step is kept only if no rank was lost, for instance after one of them ran
                      out of memory

Tested in tests/job/test_last_step.py and tests/faults/test_rescue.py.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwise.machine.memory import free_bytes
from meshwise.recovery.last_state import Among, LastState
from meshwise.recovery.state import RunState
from meshwise.spec.plan import Plan
from meshwise.spec.units import bytes_text
from meshwise.spec.world import World
from meshwise.transfer import collectives
from meshwise.workers.channel import WorkerChannel
from meshwise.workers.environment import ATTEMPT, KEPT

MOST_COST = 0.01  # of a step's time, that copies cost on average where nobody asked for them
MOST_MEMORY = 0.25  # of the host's free memory, that they take there
MEASURED = 10  # steps that are measured
PATIENCE, LOOK = 5.0, 0.005  # seconds for a step in flight to be whole again, and between two looks


def among(plan: Plan, world: World) -> Among:
    """Return which ranks hold the same parameters as this rank. After a rank is lost, these ranks divide the work of
    saving the run's last state.

    If all ranks are on CPUs, and each rank holds the whole state, a single rank saves all of it. The result then has
    `whole` set.
    """
    attempt = int(os.environ.get(ATTEMPT, "1"))
    divided = plan.parameters_divided or plan.state_divided
    if world.size > 1 and plan.data == world.size and not divided and world.kind == "cpu":
        return Among(world.size, attempt, whole=True)
    own = world.rank // (world.size // plan.data)
    return Among(world.size, attempt, own, plan.data, plan.state_divided and not plan.parameters_divided)


class LastStep:
    """Keeps copies of a run's state after its last step, so that the run can continue after a rank was lost. Call
    `keep` after each step."""

    def __init__(
        self,
        state: RunState,
        plan: Plan,
        world: World,
        folder: Path,
        redundancy: int | None,
        notify: Callable[[str], None],
    ) -> None:
        """Prepare to keep a copy of the state in memory, so that a lost rank costs at most the steps since the last
        copy.

        folder: the run folder.
        redundancy: the value of the option --redundancy; None if the user did not give it.
        notify: a function that prints a line for the user, once for all ranks.
        """
        self._state, self._world, self._notify = state, world, notify
        who = among(plan, world)
        if redundancy and who.whole:
            who = Among(who.world, who.attempt, world.rank, world.size)
        self._last = LastState(Path(os.environ[KEPT]), state, who, {"plan": str(plan)})
        state.before_change = self._last.settle
        self._whole, self._mark = who.whole, folder / "workers" / f"rescued-{who.attempt}"
        self._every = 0 if redundancy == 0 else 1
        self._given, self._begun = redundancy is not None, False
        self._costs: list[tuple[float, float]] = []
        self._before = 0.0
        self._lock = threading.Lock()  # the state is noted by one thread, and left by another

    def keep(self) -> None:
        """Keep the state that this rank has after a step, so that the run can continue from it if a rank is lost. Call
        this at the very end of a step, when the state is complete. In the first steps, the call is collective: the
        ranks agree on whether there is enough memory for copies, and on how often to copy."""
        began, last, step = time.perf_counter(), self._last, self._state.step
        due = self._every > 0 and step % self._every == 0
        with self._lock:
            if due or last.found_again:
                last.note()
        if not self._begun and self._before:  # with the optimizer's state
            self._begin()
        if due and self._every and self._begun and not self._whole:
            last.write()
        if not self._given:
            self._measure(began)
        self._before = began

    def _begin(self) -> None:
        """Check whether there is enough memory for copies of the state. If not, tell the user, and make no copies.
        Collective."""
        self._begun = True
        if self._whole:
            return
        every = collectives.gather_objects((self._last.size, free_bytes(torch.device("cpu"))), collectives.everyone())
        needed, free = 2 * sum(size for size, _ in every), min(free for _, free in every)
        own = f"{bytes_text(max(size for size, _ in every))} a rank"
        if self._given and self._every and needed > free:
            self._every = 0
            self._notify(
                f"--redundancy 1: the state is not copied to memory, because that takes {bytes_text(needed)}, but "
                f"only {bytes_text(free)} are free. After a lost worker the run resumes from the newest saved state. "
                "Choose with --save-every how often it is saved."
            )
        elif self._given and self._every:
            self._notify(f"each step copies the state to the host's memory: {own}, {bytes_text(needed)} in all.")
        elif self._every and needed > MOST_MEMORY * free:
            self._every, self._given = 0, True
            self._notify(
                f"the state is not copied to memory: it takes {bytes_text(needed)} of {bytes_text(free)} free memory. "
                "After a lost worker the run resumes from the newest saved state. --redundancy 1 copies it anyway."
            )

    def _measure(self, began: float) -> None:
        """Record how much of this step's time was spent on copying the state to memory. After MEASURED steps, choose
        how often to copy, so that copies take at most MOST_COST of the time. This choice is collective.

        began: the time at which `keep` began (time.perf_counter).
        """
        if self._before and self._begun:
            self._costs.append((time.perf_counter() - began, began - self._before))
        if len(self._costs) < MEASURED:
            return
        cost, step = (statistics.median(each) for each in zip(*self._costs, strict=True))
        often = max(collectives.gather_objects(cost / max(step - cost, 1e-9), collectives.everyone()))
        self._every, self._given = max(1, math.ceil(often / MOST_COST)), True
        if self._every > 1 and not (self._whole and self._last.found_again):
            self._notify(
                f"the state is copied to memory every {self._every} steps, as a copy takes {100 * often:.1f} % of a "
                "step. A lost worker costs the steps since the last copy. --redundancy 1 copies after every step."
            )

    def leave(self) -> bool:
        """Write the copy of the state in memory to disk, because a step has failed or hangs.

        Returns True if the state is written by this rank, or by another rank that holds the same state. Returns False
        if there is no complete copy.
        """
        with self._lock:
            if not self._last.is_whole():
                return False
            if self._whole and not self._is_first():
                return True
            left = self._last.leave()
        if self._whole and not left:
            self._mark.unlink()
        return left

    def _is_first(self) -> bool:
        """Return whether no other rank has begun to write the state. Only the first rank writes it if all ranks hold
        the whole state."""
        try:
            os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def answer(self, channel: WorkerChannel) -> None:
        """Write this rank's state to disk whenever the launcher asks for it.

        The launcher's message may arrive during a step, so the state is written in the thread that receives messages.
        """

        def leave(message: Mapping[str, Any]) -> None:
            channel.send("rescuing")
            until = time.monotonic() + PATIENCE
            with contextlib.suppress(Exception):  # what is there already is the one to tell
                while not self.leave() and time.monotonic() < until:
                    time.sleep(LOOK)
            channel.send("rescued")

        channel.listeners["rescue"] = leave
        channel.send("rescues")
