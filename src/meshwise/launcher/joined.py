"""Run a program in processes that torchrun, srun or mpirun started."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshwise.launcher.placing import check_kind
from meshwise.launcher.restarts import Restarts
from meshwise.launcher.start import opened
from meshwise.launcher.supervise import LaunchedProgram, Started
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import WorkerFailed
from meshwise.spec.exit_codes import AGAIN
from meshwise.spec.faults import faults_of
from meshwise.spec.world import World
from meshwise.training.job.options import RunOptions
from meshwise.training.recording.joined_run import begin
from meshwise.workers.gate import set_time_limit
from meshwise.workers.join import rank_context


@contextlib.contextmanager
def joined_run(
    make: Callable[[World], LaunchedProgram],
    options: RunOptions,
    began: float,
    goes_on: Callable[[], bool] = lambda: True,
) -> Iterator[Started]:
    """Run the `with` block as one rank of a run, in a process that another launcher, such as torchrun, has started."""
    options.refuse_restarts("under torchrun, srun or mpirun", "on_failure")
    if (left := options.seconds_left(began)) is not None:
        set_time_limit(left)
    world = rank_context().world
    check_kind(options.devices, world)
    slots = [WorkerSlot(world.kind, None, (), 1)] * world.size
    mine: list[Started] = []

    def open_run() -> tuple[Path, int]:
        mine.append(opened(make(world), options, slots, None, time.time()))
        return mine[0].folder, mine[0].restarts.number

    run = begin(open_run)
    restarts = Restarts(run.folder, number=run.attempt, faults=faults_of(options.fault, world.size))
    try:
        yield mine[0] if mine else Started(make(world), run.folder, slots, restarts)
    except BaseException as error:
        failure = run.ends(error)
        if failure is not None and failure.of_machine:
            code = AGAIN if goes_on() else 1
            raise WorkerFailed(failure.message, exit_code=code, failure=failure) from error
        raise
    else:
        run.ends(None)
    finally:
        if mine:
            mine[0].close()
