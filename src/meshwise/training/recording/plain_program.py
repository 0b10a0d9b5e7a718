"""Record a program that does not call meshwise.

The program may use plain PyTorch, or DDP or FSDP2 on a process group that it makes itself, or a Trainer, but
no function of meshwise such as `mw.backward`.

What the program does is seen from its calls of torch: the next batch of a DataLoader, a backward, a step of an
optimizer, a collective. The program is not changed. Recording begins with the program's first backward.

next batch asked for .. given                            data
batch given, or step ended .. backward                   forward: whatever the program does there
batch given .. next batch asked for, without a backward  evaluate
optimizer.step                                           optimizer; ends a step

Not recorded: samples and losses; a backward by `torch.autograd.grad`; steps of optimizers that do not belong to torch;
processes that the program starts itself. A step is a batch with the steps that all optimizers make on it. Without a
DataLoader, each optimizer step is a step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from meshwise.parallel.step_hooks import Order, held_parameters, subscribe
from meshwise.reports.recorder import Mark, Recorder, current, make_current
from meshwise.reports.spans import NO_COLLECTIVE, collective_name
from meshwise.spec.world import World
from meshwise.torch_compat import program_calls
from meshwise.torch_compat.collective_calls import Call, Ended, watch
from meshwise.training.engine.phases import Phases
from meshwise.training.recording.recording import Clocks, Recording, record_script
from meshwise.workers import heartbeat, verb_log
from meshwise.workers.join import made_process_group, rank_context

PATIENCE = timedelta(seconds=10)  # time limit to reach rank 0's clock, without which recording works too
BETWEEN_RANKS = ("send", "receive")
_programs: list[PlainProgram] = []
"""Holds the `PlainProgram` that watches this process. Empty once the program calls a function of meshwise itself."""


def begin(say: Callable[[str], None], own_group: Callable[[], None] | None = None) -> None:
    """Watch the calls that this process makes to torch, from now on.

    say: prints a line for the user.
    own_group: called when the program makes a process group itself, which shows that it trains without meshwise.
    """
    context = rank_context()
    context.gate.interrupts = True
    if context.gate.stopped:  # the run was stopped while this process started
        raise KeyboardInterrupt
    _programs.append(PlainProgram(context.world, own_group, say))


def end() -> Recording | None:
    """Stop watching calls to torch, as the program now calls meshwise. Return its recording, if any."""
    return _programs.pop().close() if _programs else None


def tell_what_is_missing(script: str) -> None:
    """At the end of a program, warn the user on rank 0 if its workers exchanged nothing, so that each has trained a
    separate model."""
    for program in _programs:
        if program.recording is not None and program.world.rank == 0 and not program.exchanges:
            program.say(
                f"{script}: the {program.world.size} workers exchanged nothing, so each trained a separate model. Wrap "
                "the model in DistributedDataParallel (Accelerate on CPUs needs Accelerator(cpu=True), a Trainer "
                "use_cpu=True), or pass model, optimizer and loaders to mw.distribute."
            )


class PlainProgram:
    """Watches how a program trains without meshwise, and records it. What the program does is seen from its calls to
    torch: reading a batch, a backward, an optimizer step, a collective. These calls are called watched calls."""

    def __init__(self, world: World, own_group: Callable[[], None] | None, say: Callable[[str], None]) -> None:
        self.world, self._own_group, self.say = world, own_group, say
        self.exchanges = world.size == 1
        """Whether the ranks have, or may have, exchanged values. True for a single rank, which needs no exchange."""
        self._everyone = f"{','.join(map(str, range(world.size)))}/{heartbeat.PLAIN}"
        self._recorder = Recorder(world.device, on=False)
        self._before = make_current(self._recorder)
        self.recording: Recording | None = None
        self._clocks: Clocks | None = None
        self._phases = Phases()
        self._phases.optimizers = True
        self._thread = threading.get_ident()  # other threads are not part of the loop
        self._inside = False
        self._asked: Mark = 0
        self._read = False
        """Whether a batch was read for the current step."""
        self._optimizers: set[int] = set()
        """The ids of the optimizers that have made a step since the batch was read."""
        self._ends = [
            program_calls.around("__next__", self._batch),
            program_calls.around("backward", self._backward),
            program_calls.around("init_process_group", self._group),
            subscribe(Order.PHASE, self._step_begins, self._step_ends).remove,
        ]

    def close(self) -> Recording | None:
        """Stop watching the program's calls to torch. Return its recording if it has begun."""
        while self._ends:
            self._ends.pop()()
        if self.recording is None and current() is self._recorder:
            make_current(self._before)
            if self._clocks is not None:
                self._clocks.close()
        return self.recording

    # The loop.

    @contextlib.contextmanager
    def _batch(self) -> Iterator[None]:
        if self._is_inside():
            yield
            return
        self._pass_gate()
        self._phases.batch_asked(None)
        self._asked, self._read = self._recorder.clock(), False
        try:
            with self._within():
                yield  # raises StopIteration after the last batch
        except BaseException:
            self._phases.since = None
            self._recorder.begin_step(self._phases.steps + 1)
            self._recorder.come_to("idle")
            raise
        self._phases.batch_given(None, None)
        self._read = True
        self._optimizers.clear()

    @contextlib.contextmanager
    def _backward(self) -> Iterator[None]:
        if self._is_inside():
            yield
            return
        self._begin()
        recorder, phases, before = self._recorder, self._phases, self._recorder.phase
        phases.backward_begins(None, None)
        try:
            with self._within():
                yield
        finally:
            phases.since = recorder.turn(before, "backward", phases.since)

    def _step_begins(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._read:
            self._pass_gate()
        if any(p.grad is not None for p in held_parameters(optimizer)):
            self._begin()
        self._phases.step_begins(optimizer)

    def _step_ends(self, optimizer: Optimizer) -> None:
        if threading.get_ident() != self._thread:
            return
        self._phases.step_ends(optimizer)
        if id(optimizer) in self._optimizers:  # this optimizer has stepped before on this batch
            self._read = False
        self._optimizers.add(id(optimizer))
        if not self._read and self._recorder.on:
            self._phases.step_over()

    def _pass_gate(self) -> None:
        """Raise an exception that stops the program here, if the run was asked to stop."""
        gate = rank_context().gate
        if not gate.begin():
            raise gate.stop(self._phases.done)

    def _is_inside(self) -> bool:
        """Return whether to ignore the current call to torch, which the training loop itself does not make."""
        return self._inside or threading.get_ident() != self._thread

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    # Begin to record.

    def _begin(self) -> None:
        """Begin the `Recording` if it has not begun yet."""
        if self.recording is not None:
            return
        self.recording = record_script(
            self.world, foreign=False, say=self.say, recorder=self._recorder, clocks=self._clocks
        )
        recorder, since = self._recorder, self._phases.since
        recorder.on = True
        recorder.begin_step(1)
        if self._read and isinstance(since, int):
            lane = "main" if recorder.device is None else "host"
            recorder.add(recorder.code("data", lane=lane), self._asked, since)

    # Several workers.

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """Watch collectives from now on, if the program makes the default process group in the `with` block."""
        was = dist.is_initialized()
        yield
        if was or made_process_group() or not dist.is_initialized() or self._clocks is not None:
            return
        if self._own_group is not None:
            self._own_group()
        if (dist.get_rank(), dist.get_world_size()) != (self.world.rank, self.world.size) or self.world.size == 1:
            self.exchanges |= dist.get_world_size() > 1  # not the launcher's ranks, so not watched: assume an exchange
            return
        try:
            self._ends.append(watch(self._collective, self._waits))
        except AttributeError as missing:
            self.exchanges = True  # unknown, so assume that ranks exchange data
            self.say(f"collectives are not recorded: this torch version does not have {missing}.")
        with contextlib.suppress(RuntimeError, OSError):  # record without rank 0's clock if it cannot be reached
            self._clocks = Clocks(self.world, self._recorder.clock, PATIENCE)

    def _collective(self, call: Call) -> Ended | None:
        recorder = self._recorder
        self.exchanges |= call.size > 1 and call.bytes > 0
        together = call.size == self.world.size and call.kind not in BETWEEN_RANKS
        number, beat = NO_COLLECTIVE, 0
        if together:
            number, beat = recorder.arrive(), heartbeat.enter(collective_name(call.kind, call.of), self._everyone)
            if threading.get_ident() == self._thread:
                verb_log.log_verb(call.kind)
        lane = "main" if call.blocking else "communication"
        code, start = recorder.code("communication", collective_name(call.kind, call.of), lane), recorder.mark()
        if call.dtype:
            recorder.dtypes[code, call.bytes] = call.dtype

        def ended() -> None:
            heartbeat.leave(beat)
            recorder.add(code, start, recorder.mark(), call.bytes, number)

        return ended

    def _waits(self) -> Ended | None:
        """Record the time since the last watched call as a forward. Return a function to call after the wait."""
        recorder, since = self._recorder, self._phases.since
        if since is None or self._is_inside():
            return None
        recorder.add(recorder.code("forward"), since, recorder.mark())

        def goes_on() -> None:
            self._phases.since = recorder.mark()

        return goes_on
