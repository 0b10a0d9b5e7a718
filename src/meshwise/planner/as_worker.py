"""Make this process look to a script like a run's worker.

No other processes are started. The state of this process is restored afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
from torch.utils.data import DataLoader

from meshwise.planner.fakes.cuda import torch_as_it_was
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_to_toml
from meshwise.spec.user_code import is_users, user_place
from meshwise.spec.world import VARIABLES, World
from meshwise.torch_compat.dispatch import real_values
from meshwise.torch_compat.program_calls import around
from meshwise.training.tracking.tracking import nowhere
from meshwise.workers.environment import DEVICE_KIND, EXACT_RANDOM, LOG, PLAN_FILE, RUN_FOLDER
from meshwise.workers.fork_server import Forks
from meshwise.workers.gate import StepGate
from meshwise.workers.join import RankContext, standing_for
from meshwise.workers.scratch import scratch_folder

NOT_A_WORKERS = (DEVICE_KIND, EXACT_RANDOM, LOG, RUN_FOLDER)
"""Environment variables for workers. They are hidden from the user's script while its steps are traced."""

OF_WORKERS = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "pin_memory",
)
"""Arguments of `DataLoader` that only concern worker processes."""


@contextmanager
def as_a_worker(world: World, plan: Plan) -> Iterator[io.StringIO]:
    """Within the context, make this process look to a script like a worker of a run.
    Yields the script's output."""
    said = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(_as_it_was())
        file = stack.enter_context(scratch_folder("plan")) / "plan.toml"
        file.write_text(plan_to_toml(plan), encoding="utf-8")
        for name in (*NOT_A_WORKERS, *VARIABLES):  # Trainer creates a process group if it finds VARIABLES
            os.environ.pop(name, None)
        os.environ[PLAN_FILE] = str(file)
        stack.enter_context(standing_for(RankContext(world, None, StepGate())))
        stack.enter_context(nowhere())
        stack.enter_context(patch.object(DataLoader, "__init__", _without_workers(DataLoader.__init__)))
        stack.enter_context(patch.object(BaseProcess, "start", _starts_processes))
        stack.enter_context(patch.object(Forks, "server", _starts_processes))
        stack.callback(around("__next__", real_values))
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        yield said


@contextmanager
def _as_it_was() -> Iterator[None]:
    """On exit, restore the state of the process and of torch that a script may change."""
    root, folder, modules = logging.getLogger(), Path.cwd(), set(sys.modules)
    handlers, level = root.handlers[:], root.level
    states = random.getstate(), numpy.random.get_state()
    with (
        patch.dict(os.environ),
        patch.object(sys, "argv", sys.argv[:]),
        patch.object(sys, "path", sys.path[:]),
        warnings.catch_warnings(),
        torch_as_it_was(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
            root.handlers[:], root.level = handlers, level
            os.chdir(folder)
            for name in set(sys.modules) - modules:  # the script's own modules may hold tensors of this rehearsal
                if is_users(getattr(sys.modules[name], "__file__", None) or sys.executable):
                    del sys.modules[name]


def _starts_processes(*args: Any, **kwargs: Any) -> Any:
    raise UsageError(
        f"{user_place()} starts processes, which a rehearsal cannot trace. Write the script for a single rank, "
        "because `meshwise run` starts the ranks. Or name a job in the script, such as train.py:job."
    )


def _without_workers(plain: Any) -> Any:
    """Wrap `DataLoader.__init__` so that the loader starts no worker processes."""

    names = list(inspect.signature(plain).parameters)

    def begin(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        plain(**{name: value for name, value in given.items() if name not in OF_WORKERS})

    return begin
