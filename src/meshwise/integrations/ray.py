"""Run a loop in Ray Train's workers.

Ray makes the process group, which `mw.distribute` takes as it is. Beyond that, in a worker of Ray:

    lost ranks  a rank that falls silent is named in an error of every other rank, so that FailureConfig acts
    states      a relative folder of `mw.checkpoint` lies in the run's storage. Each saved state is reported to Ray,
                which copies it only if it lies elsewhere, and it is fetched if a worker does not see it
    metrics     the last values of `mw.log` are reported with each state
    the end     what `mw.checkpoint` does as a program ends, it does as the train function returns

Based on Ray 2.60, which is imported by the worker, not here. Tested in tests/launcher/engines/test_ray.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwise.integrations.private_parts import (
    as_ray_ends,
    kill_ray_worker,
    ray_context,
    share_ray_worker,
    tell_ray,
)
from meshwise.records.checkpoints import PART, checkpoints_in
from meshwise.records.lock import Work
from meshwise.spec.errors import WorkerFailed
from meshwise.spec.exit_codes import AGAIN
from meshwise.torch_compat.reducer import own_connection_to_store
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.events import When
from meshwise.training.process import session
from meshwise.training.recovery.saving import Saver
from meshwise.training.script.state_folder import Home, homes
from meshwise.training.tracking import tracking
from meshwise.workers.store_beats import FIRST, StoreBeats, limit

HEARD = 30.0
"""Seconds until the end of this process after an error that Ray does not answer."""
_workers: list[RayWorker] = []


def begin(engine: Engine) -> None:
    """Tell Ray of this worker's loop from now on. Does nothing outside of Ray's workers."""
    context = ray_context()
    if context is None or _workers:
        return
    worker = RayWorker(engine, context)
    _workers.append(worker)
    engine.events.listen(worker, When.WATCH)
    tracking.log_to(worker.keep)
    homes.append(Home(worker.home, Work(f"Ray run {worker.storage}", int(time.time()))))
    if not as_ray_ends(context, worker.ends):
        session.tell("this version of Ray is unknown: end the train function with saved.close().")
    worker.watch()


class RayWorker:
    """What one worker of Ray Train reports."""

    def __init__(self, engine: Engine, context: Any) -> None:
        self._engine, self._context, self._metrics = engine, context, dict[str, float]()
        storage = context.storage_context
        self.storage = Path(storage.experiment_fs_path)
        self._files = storage.storage_filesystem
        self._local = self._files.type_name == "local"
        self._beats: StoreBeats | None = None

    def keep(self, values: Mapping[str, float], step: int) -> None:
        """Keep values of `mw.log` for the next report."""
        self._metrics |= values

    def home(self, folder: Path) -> Path:
        """Return where the states of `mw.checkpoint(folder)` lie, after fetching Ray's newest checkpoint if it is
        missing there."""
        folder = self.storage / folder if self._local else folder
        kept = import_module("ray.train").get_checkpoint()
        name = "" if kept is None else Path(kept.path).name
        missing = name.startswith("step-") and kept.path != str(folder / name) and not (folder / name).exists()
        if missing and self._engine.world.rank == 0:
            kept.to_directory(folder / (name + PART))
            (folder / (name + PART)).rename(folder / name)
        return folder

    def state_saved(self, saver: Saver, facts: Mapping[str, Any]) -> None:
        """Report a state, once it is written. Collective, and counted as time that the save takes."""
        began, train = time.monotonic(), import_module("ray.train")
        saver.settle()
        found = None
        if self._engine.world.rank == 0 and not saver.wrong:
            found = checkpoints_in(saver.folder)[-1].path
        here = self._local and saver.folder.is_relative_to(self.storage)
        modes = train.CheckpointUploadMode
        train.report(
            self._metrics | {name: facts[name] for name in ("step", "epoch")},
            checkpoint=found and train.Checkpoint(str(found), self._files if here else None),
            checkpoint_dir_name=found and found.name,
            checkpoint_upload_mode=modes.NO_UPLOAD if here else modes.SYNC,
        )
        saver.stall_seconds += time.monotonic() - began

    def ends(self) -> None:
        """Save and report the last state, as the train function has returned."""
        session.program_ends()
        if self._beats is not None:
            self._beats.end()
        session.end_sessions()

    def watch(self) -> None:
        """Notice ranks that fall silent."""
        world = self._engine.world
        if world.size > 1 and limit():
            share_ray_worker(_key_of(world.rank))
            place = f"{socket.gethostname()}, process {os.getpid()}"
            self._beats = StoreBeats(world, own_connection_to_store(), place, self._lost, self._limit)
            self._beats.begin()

    def _limit(self) -> float:
        return limit() if self._engine.phases.done > 1 else max(limit(), FIRST)

    def _lost(self, text: str, ranks: list[int]) -> None:
        """End this worker, whose training thread may wait in a collective for minutes."""
        print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            tell_ray(self._context, WorkerFailed(text, exit_code=AGAIN))
            for rank in ranks:  # or Ray would wait for its answer, half a minute and more
                kill_ray_worker(_key_of(rank))
            time.sleep(HEARD)
        os._exit(AGAIN)


def _key_of(rank: int) -> str:
    """Return a name for a worker of this attempt: no other one has its store's address."""
    return f"meshwise {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} {rank}"
