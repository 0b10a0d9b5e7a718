"""Keep a rank's latest state, so that a run survives losing it.

The run then continues without going back to a save.

If each rank holds all of the state, one of the surviving ranks writes it: nothing is copied before. Else each rank
copies its part after a step into memory that its launcher holds, which also has the part of a lost rank:

    --redundancy 1    after every step
    (default)         after every n-th, with the n that costs at most 1 % of a step, and where memory is plenty
    --redundancy 0    never: only where all ranks are left, as after one ran out of memory, is a step not lost

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
    """Return how ranks divide the work of keeping a state under a plan. Replicas are on the outermost axis."""
    attempt = int(os.environ.get(ATTEMPT, "1"))
    divided = plan.parameters_divided or plan.state_divided
    if world.size > 1 and plan.data == world.size and not divided and world.kind == "cpu":
        return Among(world.size, attempt, whole=True)
    own = world.rank // (world.size // plan.data)
    return Among(world.size, attempt, own, plan.data, plan.state_divided and not plan.parameters_divided)


class LastStep:
    """Keeps the state of a run after its last step. Call `keep` after each step."""

    def __init__(
        self,
        state: RunState,
        plan: Plan,
        world: World,
        folder: Path,
        redundancy: int | None,
        notify: Callable[[str], None],
    ) -> None:
        """folder: the run folder. notify: prints a line for the user, once for all ranks."""
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
        """Keep the state, after a step and everything that belongs to the step. Collective in the first steps."""
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
        """Check whether there is enough memory to keep the state; if not, say so, and keep none."""
        self._begun = True
        if self._whole:
            return
        every = collectives.gather_objects((self._last.size, free_bytes(torch.device("cpu"))), collectives.everyone())
        needed, free = 2 * sum(size for size, _ in every), min(free for _, free in every)
        own = f"{bytes_text(max(size for size, _ in every))} a rank"
        if self._given and self._every and needed > free:
            self._every = 0
            self._notify(
                f"--redundancy 1: the state is not kept in memory, since that takes {bytes_text(needed)} and "
                f"{bytes_text(free)} are free. After a lost worker the run goes on from the newest saved state: "
                "--save-every says how old that may be."
            )
        elif self._given and self._every:
            self._notify(f"each step copies {own} of the state to the host's memory, {bytes_text(needed)} in all.")
        elif self._every and needed > MOST_MEMORY * free:
            self._every, self._given = 0, True
            self._notify(
                f"the state is not kept in memory: that takes {bytes_text(needed)} of {bytes_text(free)} that are "
                "free. After a lost worker the run goes on from the newest saved state; --redundancy 1 keeps it."
            )

    def _measure(self, began: float) -> None:
        """After some measured steps, decide how often to copy the state, from the time that a copy takes."""
        if self._before and self._begun:
            self._costs.append((time.perf_counter() - began, began - self._before))
        if len(self._costs) < MEASURED:
            return
        cost, step = (statistics.median(each) for each in zip(*self._costs, strict=True))
        often = max(collectives.gather_objects(cost / max(step - cost, 1e-9), collectives.everyone()))
        self._every, self._given = max(1, math.ceil(often / MOST_COST)), True
        if self._every > 1 and not (self._whole and self._last.found_again):
            self._notify(
                f"the state is kept in memory every {self._every} steps, since a copy costs {100 * often:.1f} % of a "
                "step: a lost worker costs the steps since then. --redundancy 1 keeps every step."
            )

    def leave(self) -> bool:
        """Write the state after the last step, when a step has failed or hangs; return whether it is on disk."""
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
        """Return whether no other rank has begun to write the state, as one copy is enough."""
        try:
            os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def answer(self, channel: WorkerChannel) -> None:
        """Write the state when the launcher asks for it: in the listening thread, even during a step."""

        def leave(message: Mapping[str, Any]) -> None:
            channel.send("rescuing")
            until = time.monotonic() + PATIENCE
            with contextlib.suppress(Exception):  # what is there already is the one to tell
                while not self.leave() and time.monotonic() < until:
                    time.sleep(LOOK)
            channel.send("rescued")

        channel.listeners["rescue"] = leave
        channel.send("rescues")
