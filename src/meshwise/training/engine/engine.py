"""Give a training loop everything that a plan requires.

Scripts and jobs train with the same Engine class; `mw.distribute` uses the default engine
(training/process/session.py), and a job makes its own. They enter it in different functions:

    training/engine/steps.py, backward   for a script, which ran the forward itself
    training/job/step.py, compute        for a job: forward and backward of all microbatches of a step, so that a
                                         schedule can order them, a rehearsal can run them on fake tensors, and a
                                         recovery can run them again

The engine calls what a step needs. Observers listen to events (events.py), and leave when they have seen enough.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise import parallel
from meshwise.parallel.rng_notes import OF_DRAWS
from meshwise.reports.recorder import current
from meshwise.spec.dtypes import Dtypes
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat.loss_scale import note_scaling
from meshwise.torch_compat.sharding import groups_of, local_of, sharded_modules
from meshwise.torch_compat.tree import tensors_in
from meshwise.training.data.generators import ProgramGenerator
from meshwise.training.data.keyed import ExactDraws
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.events import EVENTS, Events, When
from meshwise.training.engine.loops import Loops
from meshwise.training.engine.phases import Phases
from meshwise.training.engine.program import Program
from meshwise.training.engine.seeds import ModelStream, StepDraws
from meshwise.transfer import collectives
from meshwise.workers.gate import StepGate

Microbatch = tuple[Any, BatchSlice]
"""The data of a microbatch on this rank, and the `BatchSlice` of its samples in the global batch."""
Seen = tuple[int, int, BatchSlice | None, Tensor | float]
"""One backward: its number, its step's number, this rank's part of the batch, and this rank's loss."""
NOTHING = contextlib.nullcontext()


class Notices:
    """Prints each notice for the user once. say: prints a line. untrue: notices that would be false in this run, and
    are therefore not printed."""

    def __init__(self, say: Callable[[str], None], untrue: Container[str] = ()) -> None:
        self._say, self.untrue = say, untrue
        self._said = set[str]()  # notices printed since the current program began
        self.all: list[str] = []
        """All notices so far. Every rank keeps them."""

    def __call__(self, text: str, rank: int = 0) -> None:
        """Print `text` for the user on a rank, unless it was printed before. An empty text is not printed."""
        if not text or text in self._said or text in self.untrue:
            return
        self._said.add(text)
        self.all += [text] if text not in self.all else []
        if collectives.get_rank(collectives.everyone()) == rank:
            self._say(text)

    def program_begins(self) -> None:
        """Allow every notice to be printed again, because another program begins in this process."""
        self._said.clear()


@dataclass(eq=False)
class Given:
    """The objects that the program gave to `mw.distribute`, except its models and optimizers."""

    stream: ModelStream | None = None
    schedulers: weakref.WeakSet[LRScheduler] = field(default_factory=weakref.WeakSet)
    loaders: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    loops: weakref.WeakSet[Generator[Any, None, None]] = field(default_factory=weakref.WeakSet)
    saves: Counter[str] = field(default_factory=Counter)
    loads: int = 0
    waits: bool = False
    loop_states: list[Any] = field(default_factory=list)
    earlier: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def finishes_epoch(self) -> bool:
        """Return whether the program should continue although the run was asked to stop."""
        return self.waits or any(state.finishes_epoch() for state in self.loop_states)

    def close(self) -> None:
        """Finish the saves of all objects that `mw.checkpoint` returned, as the program ends."""
        for state in self.loop_states:
            state.close()


class Engine:
    """Trains a program's models by a plan, until `close`. It holds models, optimizers and loaders by weak
    references."""

    carried: Any
    """Sends a checksum of what must be equal on all ranks along with each loss: an `Agreed`
    (training/guards/agreed.py)."""
    watcher: Any = None
    """Observes the engine from outside, on every rank: an `EngineWatcher` of `meshwise check`, or None."""
    calls: Any = None
    """Observes the calls of models in a program that sees whole batches: a `ModelTracer` of `meshwise check`, or
    None."""
    view: str | None = None
    """The view that the first `mw.distribute` of the program has chosen."""
    whole: Any = None
    """The `WholeView` of a program that sees whole batches; None if it sees this rank's rows."""
    part: BatchSlice | None = None
    """This rank's slice of the current batch or microbatch; None outside of batches."""
    draw_key: tuple[int, int] | None = None
    """The key for the random draws of the current batch; None before the first batch with such a key."""
    reduce = True
    has_applied = False
    """Whether the plan was applied to any model."""
    stopped = False
    """Whether a loop over batches has ended because the run was asked to stop."""
    narrow: Dtypes | None = None
    """The dtypes in which the models compute; None if these are the dtypes of the stored tensors."""
    stored: Dtypes | None = None
    """The dtypes to which batches are cast. None if the plan stores float32: no batch is then cast."""

    def __init__(
        self,
        world: World,
        gate: StepGate,
        say: Callable[[str], None],
        *,
        draws: ExactDraws | None = None,
        script: bool = False,
    ) -> None:
        """say: prints a line for the user.
        draws: makes the random draws that one device would make; None if the user did not request that.
        script: whether the training loop is in a user's script, which calls this engine. False for the loop of a
        job."""
        self.world, self.gate, self.draws = world, gate, draws
        self.notify = Notices(say, untrue=OF_DRAWS if draws is not None else ())
        # Pass a function, not a method, because batch norms hold it, and copying a model would copy the engine.
        self.program = Program(world, lambda: _samples(self.part), self.notify, piggyback_loss=script)
        self.script, self.given = script, Given()
        self.events, self.reads = Events(lambda: self.program.backwards), Loops(world)
        self.phases, self.step_draws, self.ends = Phases(), StepDraws(world), ExitStack()
        hears = ("batch_asked", "batch_given", "loop_ends")  # a job records the other phases itself
        if script:
            note_scaling()
        self.events.listen(self.phases, When.PHASE, only=EVENTS if script else hears)
        self.ends.callback(self.program.close)

    def watch(self, watcher: Any) -> None:
        """Let `watcher` observe this engine from now on."""
        self.watcher = watcher
        self.notify.untrue = OF_DRAWS  # a check makes all draws depend on keys, so these notices would be wrong
        self.carried.settings = tuple  # no settings, because a check compares them itself
        hears = ("batch_asked", "backward_begins", "step_begins", "step_ends", "loop_ends")
        self.events.listen(watcher, When.WATCH, only=hears)

    def close(self) -> None:
        """Close the engine. Later steps of the optimizers no longer call it."""
        self.given.close()
        self.ends.close()
        self.part, self.watcher = None, None

    # Models and optimizers.

    def add_models(self, models: Sequence[nn.Module], plan: Plan) -> None:
        """Apply `plan` in place to the `models` that the engine does not hold yet. Collective."""
        self.program.add_models(models, plan)
        current().held = functools.partial(held_bytes, self.program)
        current().parameters = self.program.named_parameters
        self.has_applied = self.has_applied or bool(models)
        dtypes = self.plan.dtypes
        self.stored = dtypes if dtypes.stored != "fp32" else None
        self.narrow = dtypes if dtypes.computed != dtypes.stored or dtypes.computed not in ("fp32", "fp64") else None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Replace the parameters in an optimizer with the models' parameters under the plan, such as shards."""
        self.program.add_optimizer(optimizer)
        self.phases.optimizers = True

    @property
    def notes(self) -> list[str]:
        """All notices about the plan and the program. Every rank keeps them, and rank 0 prints them."""
        return self.notify.all

    @property
    def plan(self) -> Plan:
        """The plan of the models. Before any model is added, this is a plan for one device."""
        return self.program.plan or Plan()

    # Batches.

    @functools.cached_property
    def generator(self) -> ProgramGenerator:
        """Keeps the program's own state of torch's random generator, while loops over batches use other states."""
        return ProgramGenerator()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which a forward computes in the dtypes of the plan."""
        return parallel.precision.computing(self.world.device, self.narrow) if self.narrow else NOTHING

    def cast(self, batch: Any) -> Any:
        """Return the batch, with its tensors cast to the dtypes in which the plan stores tensors."""
        return parallel.precision.cast_batch(batch, self.stored) if self.stored else batch

    def watched_backward(self, reduce: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context manager by which `self.watcher` observes a backward. Without a watcher, nothing is
        observed."""
        return self.watcher.backward(reduce) if self.watcher else NOTHING

    def on_trial(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for a run of a model whose results the program does not get."""
        return self.calls.on_trial() if self.calls else NOTHING

    def attempt(self, part: Any) -> Callable[[], None]:
        """Let `self.calls` observe a call of a model. Return a function that discards what was recorded of it."""
        return self.calls.attempt(part) if self.calls else _nothing


def held_bytes(program: Program) -> dict[str, float]:
    """Return how many bytes this rank holds on its device, in a dict with the keys `parameters`, `gradients`,
    `optimizer` (its state) and `buffers`. Gradients that are not reduced yet count as 0."""
    models, device = program.models, torch.device(program.world.device).type
    groups = (group for model in models for _, module in sharded_modules(model) for group in groups_of(module))
    gathered = {whole: part for group in groups for whole, part in group.made_from().items()}
    parameters = [gathered.get(id(p), p) for p in program.named_parameters().values()]
    waiting = program.reduction is not None and program.reduction.unreduced

    def size(tensors: Iterable[Tensor | None]) -> float:
        own = {id(t): local_of(t) for t in tensors if t is not None}.values()
        here = [t for t in own if t.device.type == device and t.layout is torch.strided]
        return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in here)

    return {
        "parameters": size(parameters),
        "gradients": 0 if waiting else size(p.grad for p in parameters),
        "optimizer": size(t for optimizer in program.optimizers for t in tensors_in(list(optimizer.state.values()))),
        "buffers": size(b for model in models for b in model.buffers()),
    }


def _nothing() -> None:
    pass


def _samples(part: BatchSlice | None) -> int | None:
    return None if part is None or part.whole else part.samples


IN_LOSS: list[Engine] = []
"""Engines of the jobs whose loss functions are running now, the innermost job last."""
