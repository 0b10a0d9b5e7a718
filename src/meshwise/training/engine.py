"""The engine: a plan applied to a program's models, and everything that a training loop needs of it.

A script's loop and a job are the same engine's; `mw.distribute` uses the default one (see session.py), a job makes its
own. A step reads no value but in the first ones, whose losses are looked at. They differ in how they enter it:

    backward(loss)                a script, which ran the forward itself
    microbatches.compute(loss)    a job: forward and backward of all microbatches of a step, so that a schedule may
                                  order them, a rehearsal run them on fake tensors and a recovery run them again
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.compat.fake import rehearsing
from meshwise.compat.gradient_reads import WATCHING
from meshwise.compat.loss_scale import note_scaling, unscaled
from meshwise.parallel.data import DROPOUT_NOTE
from meshwise.parallel.holding import is_lacked
from meshwise.parallel.precision import cast_batch, computing
from meshwise.parallel.step_hooks import Order, subscribe
from meshwise.spec.dtypes import Dtypes
from meshwise.spec.plan import Plan
from meshwise.spec.user_code import user_place
from meshwise.spec.world import World
from meshwise.training import faults
from meshwise.training.agreed import Agreed
from meshwise.training.behind_loop import BehindLoop
from meshwise.training.by_hand import HandUpdates
from meshwise.training.coupled import CoupledLosses
from meshwise.training.finite_losses import FiniteLosses
from meshwise.training.generators import ProgramGenerator
from meshwise.training.keyed import ExactDraws
from meshwise.training.loop_state import LoopState
from meshwise.training.loops import LoopRead, Loops
from meshwise.training.made_in_forward import note_made
from meshwise.training.model_stream import StepDraws
from meshwise.training.order import BatchSlice
from meshwise.training.own_loss import says_own_loss
from meshwise.training.phases import Phases
from meshwise.training.program import Program
from meshwise.training.recording import Recording
from meshwise.training.replicas import held_alike
from meshwise.training.script_steps import note_steps
from meshwise.training.split_batch import Splits
from meshwise.training.undistributed import UndistributedLoops
from meshwise.training.unsummed import UnsummedLoops
from meshwise.training.waiting_gradients import keeping
from meshwise.training.watcher import Watcher
from meshwise.training.weighing import StepWeights, check_loss, check_reduction, check_said, mean_of_sum, unpadded
from meshwise.transfer import collectives
from meshwise.workers.gate import StepGate
from meshwise.workers.worker import in_progress

Part = tuple[Any, BatchSlice]
"""A microbatch on this rank, and which slice of the global batch it is."""
Batch = TypeVar("Batch")
NOTHING = contextlib.nullcontext()
LOOKED_AT = 8  # backwards whose losses are looked at: a program may have several, and none becomes another one later


class Engine:
    """Trains a program's models under a plan. `close` it; models, optimizers and loaders are held weakly."""

    splits: Splits | None = None
    """The batches that the program splits itself, once it has split one."""
    recording: Recording | None = None
    """Ends with the engine."""
    watcher: Watcher | None = None
    part: BatchSlice | None = None
    """The microbatch that this rank works on."""
    reduce = True
    has_applied = False
    """Whether a plan was applied to some model."""
    stopped = False
    """Whether a loop over batches has ended because the run was asked to stop."""
    _narrow: Dtypes | None = None  # what is computed in, where that is not what tensors have
    _stored: Dtypes | None = None  # what batches are cast to, where that is not float32
    _looked_from = 0  # backwards of the process, when the newest of its loops began

    def __init__(
        self,
        world: World,
        gate: StepGate,
        notify: Callable[[str], None],
        *,
        draws: ExactDraws | None = None,
        script: bool = False,
    ) -> None:
        """notify: takes a line for the user. script: the loop is a script's, known from its calls alone."""
        self.world, self.gate, self._notify = world, gate, notify
        # A function, not a method: a copy of a model copies what its batch norms hold.
        self.program = Program(world, lambda: _samples(self.part), self.notify, piggyback_loss=script)
        self.draws = draws  # the exact random ones, where they are asked for
        self.schedulers: weakref.WeakSet[LRScheduler] = weakref.WeakSet()
        """Those that were given to `mw.distribute`."""
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that it has made."""
        self.finite = FiniteLosses(self.program, self.notify)
        settings = functools.partial(held_alike, self.program, self.schedulers)
        self.agreed = Agreed(world, settings, self.notify, self.finite)
        """Compares what the ranks hold, with the loss of a script."""
        self.step_draws = StepDraws(world)
        self._by_hand = HandUpdates(self.program)
        self.coupled, self.reads = CoupledLosses(), Loops(world)  # reads: what this rank reads in its loops
        self.saves: Counter[str] = Counter()
        self.loads = 0
        """How often each file was saved, and any was loaded: ranks count alike, to meet there."""
        self.loop_states: list[LoopState] = []
        """What is saved of the program's own loop."""
        self.notes: list[str] = []
        """What was said of the plan and the program, on every rank."""
        self._said = set[str]()  # to the newest program of the process
        self.earlier: weakref.WeakSet[Any] = weakref.WeakSet()
        """What `mw.distribute` was given by the programs before that."""
        several = script and world.size > 1
        self.unsummed = UnsummedLoops(lambda: self.program.models, self.notify, self.begins, on=several)
        """Evaluations of a script of which each rank has its own figures."""
        self.undistributed = UndistributedLoops(self.reads, world, self.notify) if several else None
        self.behind_loop = BehindLoop(self.program, self.notify) if several else None
        self.phases = Phases()
        faults.hold(lambda: [p for p in self.program.named_parameters().values() if not is_lacked(p)])
        self._hooks: list[Any] = [note_made(self.program, self.agreed.made)] if several else []
        self._hooks += [subscribe(Order.GUARD, self.program.check_step), self.step_draws.subscribe(self.program)]
        if script:
            note_scaling()
            self._hooks += note_steps(self.program, self.phases, lambda: self.part is not None, self.notify)

    def watch(self, watcher: Watcher) -> None:
        """Let `watcher` watch from now on."""
        self.watcher = watcher
        self.agreed.settings = tuple  # none: a check finds itself where ranks differ in them
        self._hooks.append(self.program.at_steps(Order.WATCH, watcher.step_begins, watcher.step_ends))

    def saves_loop(self, state: LoopState) -> None:
        """Tell `state` where steps end, from now on; another one of the same loader is told no more."""
        self.loop_states.append(state)

    def close(self) -> None:
        """End: optimizers step as if there were no engine."""
        for state in self.loop_states:
            state.close()
        self.unsummed.finish()
        self.coupled.close()
        for hook in self._hooks:
            hook.remove()
        self.program.close()
        if self.undistributed is not None:
            self.undistributed.close()
        if self.behind_loop is not None:
            self.behind_loop.ends()
        if self.splits is not None:
            self.splits.stream.close()
        self.part, self.watcher = None, None
        if self.recording is not None:
            self.recording.close()

    def notify(self, text: str) -> None:
        """A line for the user, once a program."""
        if not text or text in self._said or (self.draws is not None and text == DROPOUT_NOTE):  # exact draws: untrue
            return
        self._said.add(text)
        self.notes += [text] if text not in self.notes else []
        if collectives.get_rank(collectives.everyone()) == 0:
            self._notify(text)

    def begins(self, *, program: bool = False) -> None:
        """A loop at another place, or another program, begins in this process: its first steps are looked at as those
        of the first one, and it is told what that was told."""
        self._looked_from = self.program.backwards
        self.coupled.begins()
        self.agreed.shapes.backwards = 0
        self._by_hand.begins()
        if program:
            self._said.clear()
            self.earlier = weakref.WeakSet([*self.program.models, *self.program.optimizers, *self.schedulers])
            self.reads.over.clear()
            self.reads.by_place.clear()
            self.unsummed.program_begins()
            self.finite.program_begins()

    # Models and optimizers.

    def add_models(self, models: Sequence[nn.Module], plan: Plan) -> None:
        """Apply `plan` to those models that are new, in place. Collective."""
        if self.program.begins_with(models):
            self.begins(program=True)
        self.program.add_models(models, plan)
        self.finite.models_added()
        self.has_applied = self.has_applied or bool(models)
        dtypes = self.plan.dtypes
        self._stored = dtypes if dtypes.stored != "fp32" else None
        self._narrow = dtypes if dtypes.computed != dtypes.stored or dtypes.computed not in ("fp32", "fp64") else None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Give an optimizer what the plan has made of its parameters."""
        self.program.add_optimizer(optimizer)
        self.phases.optimizers = True

    @property
    def plan(self) -> Plan:
        """The plan of the models; that of one device as long as there are none."""
        return self.program.plan or Plan()

    # Batches.

    @functools.cached_property
    def generator(self) -> ProgramGenerator:
        """torch's, as the program has it outside its loops."""
        return ProgramGenerator()

    def batches(
        self,
        name: str,
        source: Iterator[Batch],
        size: int,
        *,
        limited: Callable[[int], Iterator[Batch]] | None = None,
        step: Callable[[], int] | None = None,
        read: LoopRead | None = None,
    ) -> Generator[Batch, None, None]:
        """What `source` gives, while all ranks go on; where the run was asked to stop, `stopped` is set.

        name: what a rank is in the middle of while it loops. size: samples of a batch. limited: gives another source
        whose next batch has at most so many samples. step: the number of the coming step, where the loop knows it.
        read: what `begin` is told of a script's loop.
        """
        watcher, phases = self.watcher, self.phases
        with self.generator.loop():
            in_progress.add(name)
            self.stopped = False
            if watcher is not None:
                watcher.loop_begins()
            try:
                while True:
                    phases.batch_asked()
                    if watcher is not None:
                        watcher.batch_asked()
                        limit = watcher.batch_limit(size) if limited is not None else None
                        source = source if limit is None or limited is None else limited(limit)
                    batch = next(source, None)
                    if batch is None:
                        break
                    if not self.gate.begin() and not any(state.finishes_epoch() for state in self.loop_states):
                        self.stopped = True
                        break
                    phases.batch_given(None if step is None else step())
                    yield batch
            finally:
                phases.batches_end()
                if watcher is not None:
                    watcher.loop_ends()
                self.part = None if read is None else self.reads.end(read)
                self.finite.loop_ends()
                in_progress.discard(name)

    def begin(self, part: BatchSlice, read: LoopRead | None = None) -> None:
        """This rank works on `part` from now on, which a script's loop gave."""
        self.part = part
        if read is not None:
            self.reads.begin(part, read)
            self._by_hand.batch_given(len(read.samples))
        if self.watcher is not None:
            self.watcher.batch_given(part)

    # The step.

    def backward(self, loss: Tensor, weight: Tensor | float | None = None, reduction: str | None = None) -> Tensor:
        """Add to `.grad` what one device would add for the whole batch; returns the global loss. See `mw.backward`."""
        check_said(reduction, weight)
        part, watched = self.part, self.watched_backward(self.reduce)
        around = watched if self.reduce and not WATCHING else keeping(self.program, self.reduce, watched)
        self.look_at(unscaled(loss), reduction, "", "mw.backward(loss, ", weight)
        self.program.begin_backward()
        self.unsummed.backward()
        split = NOTHING if self.splits is None else self.splits.backward(1 if reduction == "sum" else weight)
        with around, self.phases.backward(0 if part is None else part.total), split:
            mean = self._backward_of_batch(loss, weight, part, summed=reduction == "sum")
        self.reads.backward(weighed=reduction == "sum" or weight is not None)
        self.phases.loss(mean, self.finite.look)
        self.notify("" if self.draws is None else self.draws.note())
        if self.watcher is not None:
            self.watcher.loss_known(mean, loss.detach())
        return mean

    def look_at(self, loss: Any, reduction: str | None, where: str, verb: str, weight: Any = None) -> None:
        """Say, or refuse, what the first losses are taken for and are not; a check finds it itself."""
        first, part = self.program.backwards - self._looked_from <= LOOKED_AT, self.part
        looks = first and self.world.size > 1 and not rehearsing()
        if looks and self.watcher is None and part is not None and not part.whole:
            samples = part.samples if weight is None else 0
            self.notify(check_reduction(loss, reduction, self.world.size, where or user_place(), verb, samples))
            self.notify(self.coupled.look(loss, part, self.plan, where))
            self.notify("" if where else says_own_loss())

    def _backward_of_batch(
        self, loss: Tensor, weight: Tensor | float | None, part: BatchSlice | None, *, summed: bool
    ) -> Tensor:
        reduction, before = self.program.reduction, unscaled(loss)
        if reduction is None:
            self.program.check_has_models()
            self.program.plain(loss).backward()
            whole: Tensor = self.program.plain(before.detach())
            self.finite.waiting.append((self.program.backwards, self.phases.number, part, whole))
            return whole
        self.reads.check_one_share("mw.backward", weighed=summed or weight is not None)
        part, own = check_loss(loss, part), reduction.plain(loss)
        loss, before = own, own if before is loss else reduction.plain(before.detach())
        if summed:
            self.coupled.check_sum(self.program.backwards)
            loss, before = (mean_of_sum(total, part, part.total) for total in (loss, before))
        weights = StepWeights(self.world.size, self.program.coupled_gradients)
        value, _ = unpadded(before.reshape(()), weight, part.samples)
        scaled = weights.scale(*unpadded(loss.reshape(()), weight, part.samples), part, before=value)
        if weight is None:
            value = scaled.detach() if before is loss else weights.share(part)
            mean = reduction.backward(scaled, reduce=self.reduce, value=self.agreed.with_signs(value))
            assert mean is not None
            seen = self.program.backwards, self.phases.number, part, weights.losses[-1][0]
            return self.agreed.without_signs(mean, seen).to(before.dtype)
        reduction.backward(scaled, reduce=self.reduce, factor=weights.begin_sum(self.agreed.signs(scaled)))
        self.agreed.compare(weights.means(), (self.program.backwards, self.phases.number, part, weights.losses[-1][0]))
        return weights.global_mean().to(loss.dtype)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """A forward in the dtypes of the plan."""
        return computing(self.world.device, self._narrow) if self._narrow else NOTHING

    def cast(self, batch: Any) -> Any:
        """A batch in the dtype that the plan stores."""
        return batch if self._stored is None else cast_batch(batch, self._stored)

    def watched_backward(self, reduce: bool) -> contextlib.AbstractContextManager[None]:
        """Around a backward, for who looks on."""
        return self.watcher.backward(reduce) if self.watcher else NOTHING


def _samples(part: BatchSlice | None) -> int | None:
    return None if part is None or part.whole else part.samples
