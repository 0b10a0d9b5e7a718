"""Warn of evaluation loops that never reduce across ranks.

Each rank then has the figures of its samples only, which silently differ from those of one device.

An evaluation is a loop over a distributed loader that has no backward, runs a model of the program and uses its output.
It warns when it is certain that no `mw.sum`, `mw.mean` or `mw.gather_samples` comes, which may stand after the loop as
well: at the next loop at another place, the next backward, or the end of the program. Not said are

    what the program reduces itself         it calls torch.distributed in the loop's first batch or after the loop
    what only updates buffers, or warms up  the output is dropped, or bound to a name that is never read; the loop is
                                            left after one batch, or is left before anything has trained
    what prepares a training                outputs are kept as they are until the first backward of the program

A batch norm of a model that was not distributed, which runs in training mode in such a loop, causes a warning too.

Everything is looked at in the first batch of a loop alone, and in no loop over a loader at a place where there was a
backward of it once.
Compiled models are left as they are: in a program that uses torch.compile a loop runs a model when gradients are off
or a model is in evaluation mode. A barrier of torch.distributed counts as a reduction: backends tell no difference.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from meshwise.compat import compiling
from meshwise.compat.modules import BatchNorm
from meshwise.compat.tree import tensors_in
from meshwise.engine.engine import Engine
from meshwise.engine.loops import LoopRead
from meshwise.parallel.batch_norm import is_joined
from meshwise.transfer.foreign import Foreign

MISSING = (
    "{place}: this loop evaluates a model, but nothing sums its results over the ranks, so each rank has the results "
    "of its own samples only. Use mw.sum(correct), mw.mean(value, weight=n) or mw.gather_samples(values), in the loop "
    "or after it."
)
NORM = (
    "{place}: a {kind} runs in training mode in a model that was not passed to mw.distribute. It uses and stores "
    "the statistics of each rank's own samples, which differ from those of one device. Pass that model to "
    "mw.distribute too, before this loop, or copy it from the distributed model."
)
_MODULE_CALL = nn.Module.__call__.__code__.co_filename


@dataclass(eq=False)
class Loop:
    """A loop over a distributed loader.

    place: the user's source line.
    several: whether the loop has continued after its first batch.
    trained: whether there was a backward in it.
    reduced: whether values were reduced over the ranks in it."""

    place: str
    loader: int = 0
    models: Sequence[nn.Module] = ()
    prepares: bool = False
    """Whether the program had not run any backward when the loop began."""
    several: bool = False
    trained: bool = False
    reduced: bool = False
    ran: bool = False
    """Whether a submodule of a distributed model has run. The model itself may not have run as a whole."""
    used: bool | None = None
    """Whether the program uses the output of the first model call in this loop. None before the loop calls a model."""
    output: StorageWeakRef | None = None
    norm: str = ""
    """The class name of a batch norm that ran in training mode in a model that is not distributed; else empty."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    norms: RemovableHandle | None = None
    foreign: Foreign | None = None

    def watch(self) -> None:
        """Begin to watch the first batch of this loop. Forward hooks on the models record which models the loop calls,
        and whether the loop uses their outputs. If the program uses torch.compile, no hooks are registered."""
        self.foreign = Foreign()
        if compiling.is_used():
            return
        given = {module for model in self.models for module in model.modules()}
        self.norms = register_module_forward_hook(functools.partial(_ran_anywhere, self, given))
        for name, module in (found for model in self.models for found in model.named_modules()):
            if name.count(".") < 2 and not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                hook = functools.partial(_ran_inside if name else _ran, self)
                self.hooks.append(module.register_forward_hook(hook))

    def first_batch_ends(self) -> None:
        """Stop watching, because the program has finished the first batch."""
        self.several = True
        self.end_watch()

    def remove_hooks(self) -> None:
        """Remove this loop's forward hooks from the models."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def end_watch(self) -> None:
        """Stop watching this loop: remove its hooks from the models."""
        self.remove_hooks()
        if self.norms is not None:
            self.norms.remove()
            self.norms = None
        if self.foreign is not None:
            self.reduced |= self.foreign.close()
            self.foreign = None
            if compiling.is_used():
                self.ran = not torch.is_grad_enabled() or any(not model.training for model in self.models)
        self.models = ()

    @property
    def is_evaluation(self) -> bool:
        """Whether the loop ran a model and used the model's output, but had no backward."""
        return (self.ran if self.used is None else self.used) and not self.trained


class UnsummedLoops:
    """Warns the user if an evaluation's results are never summed over the ranks. One instance watches all loops of a
    program.

    models: returns the models that were given to `mw.distribute`.
    say: prints a warning for the user.
    expects: called with this instance when a loop begins. `expects` must make the engine call this instance's
        `backward_begins` at the start of the next backward.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[nn.Module]],
        say: Callable[[str], None],
        expects: Callable[[UnsummedLoops], None] = lambda loops: None,
    ) -> None:
        self._models, self._say, self._expects = models, say, expects
        self._open: dict[LoopRead, Loop] = {}
        self._waiting: list[Loop] = []
        self._training: set[tuple[str, int]] = set()
        self._told: set[str] = set()
        self.places: list[str] = []
        """The source lines of the loops that the user was warned about."""

    def batch_asked(self, loop: LoopRead) -> None:
        """Begin or end the watch over a loop's first batch. Called each time a loop over a distributed loader asks for
        a batch. The first request begins the watch, and the second request ends the watch."""
        if loop.given == 0:
            self._begin(loop)
        elif loop.given == 1 and loop in self._open:
            self._open[loop].first_batch_ends()

    def _begin(self, read: LoopRead) -> None:
        place = read.place
        self._say_waiting(lambda waiting: waiting.place != place and not self._is_kept(waiting))
        loop = self._open[read] = Loop(place, read.loader, self._models(), prepares=not self._training)
        self._expects(self)
        if (place, read.loader) not in self._training:
            loop.watch()

    def loop_ends(self, read: LoopRead) -> None:
        """Record that the loop has ended, or that the program left it."""
        loop = self._open.pop(read, None)
        if loop is None:
            return
        loop.end_watch()
        if loop.norm:
            self._say(NORM.format(place=loop.place, kind=loop.norm))
        left_early = not read.over and not (loop.several and self._training)
        if loop.is_evaluation and not loop.reduced and not left_early:
            loop.foreign = Foreign()
            self._waiting.append(loop)

    def backward_begins(self, *_: object) -> None:
        """Warn the user about each evaluation loop that has ended without a sum over the ranks. A backward means that
        training continues, so the program will not sum the results of these loops any more."""
        self._say_waiting(lambda loop: not self._is_kept(loop))
        self._forget_waiting()  # what is kept is used in training
        for loop in self._open.values():
            loop.trained = True
            self._training.add((loop.place, loop.loader))

    def reduced(self) -> None:
        """Record that the program has reduced values over the ranks. They may be the results of any earlier loop, so
        the user gets no warning about the loops up to now."""
        for loop in self._open.values():
            loop.reduced = True
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        for loop in self._waiting:
            if loop.foreign is not None:
                loop.foreign.close()
        self._waiting.clear()

    def program_begins(self) -> None:
        """Forget which loops have trained and which were warned about, because another program begins."""
        self._training.clear()
        self._told.clear()
        for loop in self._waiting:
            loop.prepares = False

    def finish(self) -> None:
        """Warn of all remaining evaluation loops with results that were never summed over the ranks. Called when the
        program ends."""
        self._say_waiting(lambda loop: True)

    def _is_kept(self, loop: Loop) -> bool:
        """Return whether the loop probably prepares the training, e.g. computes features with a frozen model."""
        return loop.prepares and loop.output is not None and not loop.output.expired()

    def _say_waiting(self, which: Callable[[Loop], bool]) -> None:
        for loop in [loop for loop in self._waiting if which(loop)]:
            self._waiting.remove(loop)
            by_the_program = loop.foreign is not None and loop.foreign.close()
            if not by_the_program and loop.place not in self._told:
                self._told.add(loop.place)
                self.places.append(loop.place)
                self._say(MISSING.format(place=loop.place))


def _ran(loop: Loop, module: nn.Module, arguments: Any, output: Any) -> None:
    """Record that the loop called a model, and whether the program uses the model's output."""
    loop.remove_hooks()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == _MODULE_CALL:
        frame = frame.f_back
    loop.used = frame is None or not drops(frame.f_code, frame.f_lasti)
    first = next(iter(tensors_in(output)), None)
    if first is not None:
        loop.output = StorageWeakRef(first.untyped_storage())


def _ran_anywhere(loop: Loop, given: set[nn.Module], module: nn.Module, arguments: Any, output: Any) -> None:
    if isinstance(module, BatchNorm) and module.training and module not in given and not is_joined(module):
        loop.norm = type(module).__name__


def _ran_inside(loop: Loop, module: nn.Module, arguments: Any, output: Any) -> None:
    loop.ran = True


@functools.cache
def drops(code: CodeType, at: int) -> bool:
    """Return whether the result of the call at instruction `at` is unused: dropped, or assigned to a name that is never
    read."""
    instructions = list(dis.get_instructions(code))
    after = next((i for i in instructions if i.offset > at), None)
    if after is None or after.opname == "POP_TOP":
        return after is not None
    name = after.argval
    return after.opname.startswith("STORE") and not any(
        "LOAD" in i.opname and (i.argval == name or (isinstance(i.argval, tuple) and name in i.argval))
        for i in instructions
    )


def watch(engine: Engine) -> None:
    """Warn the user if the results of an evaluation loop are never summed over the ranks. Only scripts on several ranks
    are watched.

    engine: the engine of the running program.
    """
    if engine.script and engine.world.size > 1:
        loops = UnsummedLoops(lambda: engine.program.models, engine.notify, engine.events.begins)
        engine.events.listen(loops, only=("batch_asked", "loop_ends"), batches=2)
        engine.events.listen(loops, only=("backward_begins",), backwards=1)
        engine.ends.callback(loops.finish)
