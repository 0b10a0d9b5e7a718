"""Rehearse a script on fake tensors, until its second step ends.

The script is one with the two lines, and runs in this process.

It gets the plan, its rank and the world in the same ways as a worker of `meshwise run`. Its files are really read, its
output is not shown, and afterwards the state of this process is restored. A number that only a real run knows
(`loss.item()`) is taken to be 1 outside of the model, and a note says where; inside the model it is refused.

Tested in tests/rehearsal/test_scripts.py.
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
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from meshwise.compat.fake import real_values
from meshwise.compat.fake_values import fake_without_values, guessing
from meshwise.compat.program_calls import around_batches
from meshwise.compat.sharding import local_of
from meshwise.engine.engine import Engine
from meshwise.engine.events import When
from meshwise.parallel.batch_norm import normalises
from meshwise.parallel.fits import check_for_scripts
from meshwise.process.session import apart
from meshwise.rehearsal.fakes.cuda import cuda_by_name, torch_as_it_was
from meshwise.rehearsal.from_few import Facts
from meshwise.rehearsal.memory import memory_curve
from meshwise.rehearsal.places import Places
from meshwise.rehearsal.record import Record
from meshwise.rehearsal.shorter import Forward
from meshwise.rehearsal.trace import STEPS, Trace, kinds_of_ranks, refused, rehearsal, state_of
from meshwise.rehearsal.work import Launch, Operation, Work
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_to_toml
from meshwise.spec.user_code import is_users, user_place
from meshwise.spec.world import World
from meshwise.timeline.recorder import Mark, make_current
from meshwise.tracking.tracking import nowhere
from meshwise.workers.environment import BLOCKS, DEVICE_KIND, EXACT_RANDOM, LOG, PLAN_FILE, RUN_FOLDER
from meshwise.workers.fork_server import ForkServer
from meshwise.workers.gate import StepGate
from meshwise.workers.join import RankContext, standing_for
from meshwise.workers.scratch import scratch_folder

NOT_A_WORKERS = (BLOCKS, DEVICE_KIND, EXACT_RANDOM, LOG, RUN_FOLDER)
"""Environment variables of this process that a rehearsed script must not see."""

OF_WORKERS = (
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "pin_memory",
)
"""Arguments of a DataLoader that concern its worker processes."""

WHOLE = (
    "gradients that wait in mw.accumulate() are whole on each rank. mw.backward outside of it keeps a rank's part, "
    "which is less memory under shard, and reduces each batch."
)
LATE = (
    "the last batch of a step is in mw.accumulate(): its gradients are reduced after its backward, and those that wait "
    "are held beside their means. Leave it outside of mw.accumulate(), and they are reduced meanwhile."
)
_UNKNOWN = Facts(None, False, 0, 0)


@dataclass(frozen=True)
class Script:
    """A program with its own loop. run: runs the program in this process, as `python name` does. batch_size: of its
    global batch. model: what is known of its models."""

    name: str
    run: Callable[[], object]
    batch_size: int = 0
    model: Facts = _UNKNOWN


class RehearsalEnds(BaseException):
    """The rehearsal has seen enough steps. No Exception, so that `except Exception` of a script does not catch it."""


def known_script(name: str, run: Callable[[], object], kind: str) -> Script:
    """Rehearse the first steps of a script on one device, and return it with what a search must know of it."""
    loop = _rehearsed(Script(name, run), Plan(), kind)
    work = Work(0, 1, kind, *loop.works[-1])
    parameters = work.holds("parameters")
    wide = parameters // 4 if work.dtype in ("fp32", "tf32") else 0
    facts = Facts(None, loop.batch_norms, parameters, parameters, wide, _forward(work))
    return Script(name, run, loop.batch_size, facts)


def _forward(work: Work) -> Forward:
    """Estimate the size of a forward from a recorded step, without knowing the blocks of its models."""
    forwards = [each for each in work.launches if each.phase == "forward"]
    operations = [each.what for each in forwards if isinstance(each.what, Operation)]
    kept = memory_curve(work).peak.split.get("activations", 0)
    products = sum(each.written for each in operations if each.flops)
    flops = sum(each.flops for each in operations)
    return Forward(flops, len(operations), kept, min(products, kept), kept // 10, 0, kept // 10, 1)


def trace_script(script: Script, plan: Plan, kind: str = "gpu", speeds: Sequence[Hashable] = ()) -> list[Trace]:
    """Trace what the ranks of `plan` do in the first steps of a script: one rank of each kind, as `trace` does.

    Raises PlanError for a plan that scripts cannot have, UsageError with the source line if it cannot be rehearsed.
    """
    check_for_scripts(plan)
    return [_trace_rank(script, plan, kind, rank) for rank in kinds_of_ranks(plan, speeds)]


def _trace_rank(script: Script, plan: Plan, kind: str, rank: int) -> Trace:
    loop = _rehearsed(script, plan, kind, rank)
    works = [Work(rank, plan.devices, kind, held, events, tuple(loop.notes)) for held, events in loop.works]
    return Trace(works[0], works[-1])


class _Loop(Places):
    """A recorder that follows a script's loop, sorts the recorded events into steps, and ends it after STEPS steps."""

    def __init__(self, record: Record, engine: Engine) -> None:
        super().__init__()
        self.works: list[tuple[Any, Any]] = []
        self.notes, self.batch_size, self.batch_norms = engine.notes, 0, False
        self._record, self._engine = record, engine
        self._held: Any = ()
        self._asked = self._batch = self._alone = 0
        self._trained = self._stepped = self._waits = False
        self._known: set[int] = set()
        engine.events.listen(self, When.WATCH, only=("step_begins", "step_ends"))

    def turn(self, phase: str, over: str = "", since: Mark | None = None) -> Mark:
        if phase == "data":
            self._asked = len(self._record.events)
        self._trained = self._trained or phase == "backward"
        if over == "backward":
            self._record.backward_ends()  # more batches of the step may follow, or who reads a gradient
            self._waits = self._engine.world.size > 1 and not self._engine.reduce
            if self._waits and self._engine.plan.shard > 1:
                self._engine.notify(WHOLE)
        return super().turn(phase, over, since)

    def begin_step(self, step: int) -> None:
        """Begin a step when its batch is read. Raises RehearsalEnds if enough steps have been recorded."""
        super().begin_step(step)
        self._look()
        self._record.allocated_since(self._asked, "input")
        by_hand = self._trained and not self._engine.phases.optimizers  # its steps are batches
        self._stepped = self._stepped or by_hand
        if self._stepped or not self._trained:
            self.end()
            if len(self.works) == STEPS:
                raise RehearsalEnds
        self.phase, self._batch = "forward", self._batch + 1

    def end(self) -> None:
        """End the current step, if there is one: what follows does not belong to it."""
        held, events = self._record.cut()
        if self._stepped and len(self.works) < STEPS:
            self.works.append((self._held, events))
            self.batch_size = self.batch_size or self.samples
        self._held, self._trained, self._stepped, self._batch, self.samples = held, False, False, -1, 0

    def _look(self) -> None:
        for model in self._engine.program.models:
            self._record.tell(map(local_of, model.parameters()), "parameters")
            self._record.tell(map(local_of, model.buffers()), "buffers")
            self._record.tell((local_of(p.grad) for p in model.parameters() if p.grad is not None), "gradients")
            if id(model) not in self._known:
                self._known.add(id(model))
                self.follow(model, lambda: self._batch)
                self.batch_norms = self.batch_norms or any(map(normalises, model.modules()))

    def step_begins(self, optimizer: Optimizer) -> None:
        self._record.backward_ends()
        self._look()
        if self._waits and self._engine.plan.shard == 1:
            self._engine.notify(LATE)
        self.span("optimizer")
        self.phase = "optimizer"

    def step_ends(self, optimizer: Optimizer) -> None:
        self._record.tell(state_of(optimizer), "optimizer")
        self.phase, self._stepped = "other", self._trained

    def stepped(self) -> None:
        """Count a step of any optimizer. Raises RehearsalEnds after some, if the script has distributed no model."""
        if not self._engine.has_applied:
            self._alone += 1
            if self._alone > STEPS:
                raise RehearsalEnds

    def number(self, dtype: torch.dtype) -> float | None:
        """Return the value to assume for a number that the script reads outside of its model: 1; None for a bool."""
        if dtype == torch.bool:
            return None
        self._engine.notify(f"{user_place()} reads a number that only a run knows: it is taken for 1")
        return 1 if not dtype.is_floating_point else 1.0


def _rehearsed(script: Script, plan: Plan, kind: str, rank: int = 0) -> _Loop:
    with rehearsal(kind, rank, plan.devices, {}) as (record, mode):
        world = World(rank, plan.devices, rank, plan.devices, record.device)
        with _as_a_worker(world, plan) as said, apart() as engine:
            engine.carried.rehearses = True
            loop = record.places = _Loop(record, engine)
            before = make_current(loop)
            try:
                with mode, cuda_by_name(kind != "cpu"), guessing(loop.number), fake_without_values(), _steps_seen(loop):
                    _run(script, loop, said)
            finally:
                make_current(before)
            if not loop.works:
                raise UsageError(_no_step(script, engine))
    if kind != "cpu" and not any(isinstance(event, Launch) for event in loop.works[-1][1]):
        raise UsageError(
            f"{script.name} computes nothing on the GPU: its model stays where it was made. Move it, and each batch: "
            "device = 'cuda' if torch.cuda.is_available() else 'cpu', model.to(device). Or plan for a CPU: 4xcpu."
        )
    return loop


@contextmanager
def _steps_seen(loop: _Loop) -> Iterator[None]:
    """In the block, call `loop.stepped()` after each step of any optimizer, even one that mw.distribute never got."""
    handle = register_optimizer_step_post_hook(lambda *unused: loop.stepped())
    try:
        yield
    finally:
        handle.remove()


def _run(script: Script, loop: _Loop, said: io.StringIO) -> None:
    try:
        script.run()
    except RehearsalEnds:
        return
    except SystemExit as end:
        if end.code not in (None, 0) and len(loop.works) < STEPS:
            why = str(end.code) if isinstance(end.code, str) else said.getvalue().strip().rpartition("\n")[2]
            raise UsageError(f"{script.name} ends before its second step: {why or f'exit code {end.code}'}") from None
    except Exception as error:
        if len(loop.works) < STEPS:
            raise refused(script.name, error) from error
    with contextlib.suppress(RehearsalEnds):
        loop.end()


def _no_step(script: Script, engine: Engine) -> str:
    if not engine.has_applied:
        return (
            f"{script.name} never gives a model to mw.distribute, so no plan can be tried. Add the two lines: model, "
            "optimizer, loader = mw.distribute(model, optimizer, loader), and mw.backward(loss) for loss.backward()."
        )
    return (
        f"{script.name} ended without a step: after mw.backward(loss), in a loop over a loader of mw.distribute, no "
        "optimizer made a step. Give it options that make it train, after its name."
    )


@contextmanager
def _as_a_worker(world: World, plan: Plan) -> Iterator[io.StringIO]:
    """In the block, let a script see this process as a worker of a run with this plan. Yield what it prints."""
    said = io.StringIO()
    with ExitStack() as stack:
        stack.enter_context(_as_it_was())
        file = stack.enter_context(scratch_folder("plan")) / "plan.toml"
        file.write_text(plan_to_toml(plan), encoding="utf-8")
        for name in NOT_A_WORKERS:
            os.environ.pop(name, None)
        ranks = {"RANK": world.rank, "LOCAL_RANK": world.local_rank}
        ranks |= {"WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.local_size}
        os.environ.update({PLAN_FILE: str(file), **{name: str(value) for name, value in ranks.items()}})
        stack.enter_context(standing_for(RankContext(world, None, StepGate())))
        stack.enter_context(nowhere())
        stack.enter_context(patch.object(DataLoader, "__init__", _without_workers(DataLoader.__init__)))
        stack.enter_context(patch.object(BaseProcess, "start", _starts_processes))
        stack.enter_context(patch.object(ForkServer, "__init__", _starts_processes))
        stack.callback(around_batches(real_values))
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        yield said


@contextmanager
def _as_it_was() -> Iterator[None]:
    """After the block, undo what a script has changed in this process, such as its environment and folder."""
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
            for name in set(sys.modules) - modules:  # its own modules may hold tensors of this rehearsal
                if is_users(getattr(sys.modules[name], "__file__", None) or sys.executable):
                    del sys.modules[name]


def _starts_processes(*args: Any, **kwargs: Any) -> Any:
    raise UsageError(
        f"{user_place()} starts processes, and a rehearsal is this one alone. Let `meshwise run` start them: write the "
        "script as one rank of it runs; or name its Job, train.py:job."
    )


def _without_workers(plain: Any) -> Any:
    """Wrap `DataLoader.__init__` so that the loader starts no worker processes: these would not be rehearsed."""

    names = list(inspect.signature(plain).parameters)

    def begin(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        plain(**{name: value for name, value in given.items() if name not in OF_WORKERS})

    return begin
