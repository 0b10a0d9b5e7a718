"""Rehearse a script on fake tensors, until its second step ends.

The script uses `mw.distribute` and `mw.backward`. It runs in this process.

It gets the plan, its rank and the world size in the same ways as a worker of `meshwise run`. Files are really read,
output is not shown, and afterwards the state of this process is restored. A number that only a real run can compute
(`loss.item()`) is taken to be 1 outside of the model, and a note names the line that reads it. Inside the model,
reading such a number is an error.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwise.parallel.batch_norm import normalises
from meshwise.parallel.fits import check_for_scripts
from meshwise.planner.as_worker import as_a_worker
from meshwise.planner.fakes.cuda import cuda_by_name
from meshwise.planner.memory import memory_curve
from meshwise.planner.places import Places
from meshwise.planner.record import Record
from meshwise.planner.shorter import Forward
from meshwise.planner.trace import STEPS, Trace, kinds_of_ranks, refused, rehearsal, state_of
from meshwise.planner.tracer import Facts
from meshwise.planner.work import CATEGORIES, Operation, Work
from meshwise.reports.recorder import Mark, make_current
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.user_code import is_users, user_place
from meshwise.spec.world import World
from meshwise.torch_compat.fake_values import fake_without_values, guessing
from meshwise.torch_compat.sharding import local_of
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.events import When
from meshwise.training.process.session import apart

WHOLE = (
    "while a step accumulates batches, each rank keeps whole gradients. If mw.backward is called outside of "
    "mw.accumulate(), it reduces the gradients of each batch. Under shard, each rank then keeps only its part of them."
)
LATE = (
    "the last batch of a step is also inside mw.accumulate(), so gradients are reduced after its backward, and their "
    "means need extra memory. Leave the last batch outside of mw.accumulate(): its backward then reduces the gradients."
)
NO_LINES = (
    "{} never passes a model to mw.distribute, so no plan can be tried. Add model, optimizer, loader = mw.distribute("
    "model, optimizer, loader). With a Trainer of transformers or "
    "Lightning, add trainer = mw.distribute(trainer). docs/from-ddp.md and docs/from-accelerate.md say what to remove."
)
NO_STEP = (
    "{} ended before it trained: no optimizer made a step after a backward in a loop over a loader of "
    "mw.distribute. If the script needs options to train, write them after its name."
)
_UNKNOWN = Facts(None, False, 0, 0)


@dataclass(frozen=True)
class Script:
    """A program with its own training loop."""

    name: str
    run: Callable[[], object]
    batch_size: int = 0
    model: Facts = _UNKNOWN


class RehearsalEnds(BaseException):
    """Raised to end a script after enough steps. It is not an Exception, so that the script's `except Exception` does
    not catch it."""


def known_script(name: str, run: Callable[[], object], kind: str) -> Script:
    """Trace the first steps of a script on one device.
    Return the script with facts about its model."""
    script = Script(name, run)
    loop = _rehearsed(script, Plan(), kind)
    work = Work(0, 1, kind, *loop.works[-1])
    parameters = work.holds("parameters")
    wide = parameters // 4 if work.dtype in ("fp32", "tf32") else 0
    steps = [each.what for each in work.launches if each.phase == "optimizer" and isinstance(each.what, Operation)]
    stepped = sum(each.read + each.written for each in steps) / max(parameters, 1)
    facts = Facts(None, loop.batch_norms, parameters, parameters, wide, _forward(work), stepped)
    return replace(script, batch_size=loop.batch_size, model=facts)


def _forward(work: Work) -> Forward:
    """Estimate the size of a forward pass from a recorded step, without knowing the blocks of the script's models."""
    forwards = [each for each in work.launches if each.phase == "forward"]
    operations = [each.what for each in forwards if isinstance(each.what, Operation)]
    kept = int(memory_curve(work).by_category[:, CATEGORIES.index("activations")].max())
    blocks = len({each.module for each in forwards if each.module}) or 1
    products = sum(each.written for each in operations if each.flops)
    flops = sum(each.flops for each in operations)
    return Forward(flops, len(operations), kept, min(products, kept), kept // max(blocks, 10), 0, kept // 10, blocks)


def trace_script(script: Script, plan: Plan, kind: str = "gpu", speeds: Sequence[Hashable] = ()) -> list[Trace]:
    """Trace the first steps of a script under a plan, once for each kind of rank."""
    check_for_scripts(plan)
    return [_trace_rank(script, plan, kind, rank) for rank in kinds_of_ranks(plan, speeds)]


def _trace_rank(script: Script, plan: Plan, kind: str, rank: int) -> Trace:
    loop = _rehearsed(script, plan, kind, rank)
    works = [Work(rank, plan.devices, kind, held, events, tuple(loop.notes)) for held, events in loop.works]
    return Trace(works[0], works[-1])


class _Loop(Places):
    """Follows a script's training loop, sorts events into steps, and ends the script after STEPS."""

    def __init__(self, record: Record, engine: Engine) -> None:
        super().__init__()
        self.works: list[tuple[Any, Any]] = []
        self.notes, self.batch_size, self.batch_norms = engine.notes, 0, False
        self._record, self._engine = record, engine
        self._held: Any = ()
        self._asked = self._batch = self._alone = 0
        self._trained = self._stepped = self._stepping = self._waits = False
        self._known: set[int] = set()
        engine.events.listen(self, When.WATCH, only=("step_begins", "step_ends"))

    def turn(self, phase: str, over: str = "", since: Mark | None = None) -> Mark:
        if phase == "data":
            self._asked = len(self._record.events)
        self._trained = self._trained or phase == "backward"
        self._stepping = phase == "optimizer" or (self._stepping and over != "optimizer")
        if phase == "optimizer" and not self._trained:
            phase = "forward"  # the optimizer's closure runs forward and backward
        elif over == "backward" and self._stepping:
            phase = "optimizer"
        if over == "backward":
            self._record.backward_ends()  # now, because memory allocated later is not gradients
            self._waits = self._engine.world.size > 1 and not self._engine.reduce
            if self._waits and self._engine.plan.shard > 1:
                self._engine.notify(WHOLE)
        return super().turn(phase, over, since)

    def begin_step(self, step: int) -> None:
        """Begin a step when its batch is read. Raises RehearsalEnds if enough steps have been recorded."""
        super().begin_step(step)
        # At the first step, all memory so far counts as input, until `_look` names what the models hold.
        self._record.allocated_since(self._asked if self._known else 0, "input")
        self._look()
        by_hand = self._trained and not self._engine.phases.optimizers  # without an optimizer, each batch is a step
        self._stepped = self._stepped or by_hand
        if self._stepped or not self._trained:
            self.end()
            if len(self.works) == STEPS:
                raise RehearsalEnds
        self.phase, self._batch = "forward", self._batch + 1

    def end(self) -> None:
        """End the current step, if there is one. Later events do not belong to it."""
        held, events = self._record.cut()
        if self._stepped and len(self.works) < STEPS:
            self.works.append((tuple(self._record.with_categories(self._held)), events))
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
        self.phase = "optimizer" if self._trained else "forward"

    def step_ends(self, optimizer: Optimizer) -> None:
        self._record.tell(state_of(optimizer), "optimizer")
        self.phase, self._stepped = "other", self._trained

    def stepped(self) -> None:
        """Count an optimizer step of a script without `mw.distribute`. End the script after STEPS."""
        if not self._engine.has_applied:
            self._alone += 1
            if self._alone > STEPS:
                raise RehearsalEnds

    def number(self, dtype: torch.dtype) -> float | None:
        """Return 1 for a number that a script reads outside of its model, and None for a bool."""
        if dtype == torch.bool:
            return None
        self._engine.notify(f"{user_place()} reads a number that only a real run computes. The rehearsal assumes 1.")
        return 1 if not dtype.is_floating_point else 1.0


def _rehearsed(script: Script, plan: Plan, kind: str, rank: int = 0) -> _Loop:
    with rehearsal(kind, rank, plan.devices, {}) as (record, mode):
        world = World(rank, plan.devices, rank, plan.devices, record.device, given=True)
        with as_a_worker(world, plan) as said, apart() as engine:
            engine.carried.rehearses = True
            loop = record.places = _Loop(record, engine)
            before, seen = make_current(loop), register_optimizer_step_post_hook(lambda *unused: loop.stepped())
            try:
                with mode, cuda_by_name(kind != "cpu"), guessing(loop.number), fake_without_values():
                    _run(script, loop, said)
            finally:
                make_current(before)
                seen.remove()
            if not loop.works:
                raise UsageError((NO_STEP if engine.has_applied else NO_LINES).format(script.name))
    return loop


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
            if not isinstance(error, MeshwiseError) and not _names_us(error):
                raise UsageError(NO_LINES.format(script.name)) from error
            raise refused(script.name, error) from error
    with contextlib.suppress(RehearsalEnds):
        loop.end()


def _names_us(error: Exception) -> bool:
    """Return whether one of the user's files in the error's traceback contains the word meshwise."""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)}
    return any("meshwise" in line for file in files for line in linecache.getlines(file))
