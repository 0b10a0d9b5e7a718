"""The engine: a plan applied to a program's models, and everything that a training loop needs of it.

A script's loop and a job are the same engine's; `mw.distribute` uses the default one (see session.py), a job makes its
own. They differ in how they enter a step:

    backward(loss)                a script, which ran the forward itself
    compute(loss_function, ...)   a job: forward and backward of all microbatches of a step, so that a schedule may
                                  order them, a rehearsal run them on fake tensors and a recovery run them again

The step never reads a value.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from meshwise.parallel.apply import scale_gradients
from meshwise.parallel.data import DROPOUT_NOTE
from meshwise.parallel.precision import cast_batch, computing
from meshwise.parallel.step_hooks import After, Order, Subscription, subscribe
from meshwise.spec.dtypes import Dtypes
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.timeline.recorder import current
from meshwise.training.exact import ExactDraws
from meshwise.training.order import BatchSlice
from meshwise.training.phases import Phases
from meshwise.training.program import Program
from meshwise.training.recording import Recording
from meshwise.training.watcher import Watcher
from meshwise.training.weighing import Losses, StepWeights, split_weight, total_of, unpadded
from meshwise.transfer import collectives
from meshwise.transfer.splitmix import mixed
from meshwise.workers.gate import StepGate
from meshwise.workers.worker import in_progress

Part = tuple[Any, BatchSlice]
"""A microbatch on this rank, and which slice of the global batch it is."""
Batch = TypeVar("Batch")
NOTHING = contextlib.nullcontext()
Number = TypeVar("Number", int, float, Tensor)


class Engine:
    """Trains a program's models under a plan. `close` it; models, optimizers and loaders are held weakly."""

    def __init__(
        self,
        world: World,
        gate: StepGate,
        notify: Callable[[str], None],
        *,
        draws: ExactDraws | None = None,
        infer_phases: bool = False,
    ) -> None:
        """notify: takes a line for the user. infer_phases: the loop is a script's, known from its calls alone."""
        self.world, self._gate, self._notify = world, gate, notify
        self.program = Program(world, lambda: self.part is None or self.part.samples > 0, self.notify)
        self.draws = draws
        """The exact random draws of jobs, where they are asked for."""
        self._narrow: Dtypes | None = None  # what is computed in, where that is not what tensors have
        self._stored: Dtypes | None = None  # what batches are cast to, where that is not float32
        self.recording: Recording | None = None
        """Ends with the engine."""
        self.watcher: Watcher | None = None
        self.schedulers: weakref.WeakSet[LRScheduler] = weakref.WeakSet()
        """Those that were given to `mw.distribute`."""
        self.part: BatchSlice | None = None
        """The microbatch that this rank works on."""
        self.used_padding = False
        """Whether the loop that ended last gave some rank a padding sample."""
        self.reduce = True
        self.has_applied = False
        """Whether a plan was applied to some model."""
        self.stopped = False
        """Whether a loop over batches has ended because the run was asked to stop."""
        self.saves: Counter[str] = Counter()
        self.loads = 0
        """How often each file was saved, and any was loaded: ranks count alike, to meet there."""
        self.notes: list[str] = []
        """What was said of the plan and the program, on every rank."""
        self._phases = Phases()
        self._hooks = [subscribe(Order.GUARD, self.program.check_step)]
        if infer_phases:
            self._hooks.append(self._at_steps(Order.PHASE, self._phases.optimizer_begins, self._phases.optimizer_ends))

    def watch(self, watcher: Watcher) -> None:
        """Let `watcher` watch from now on."""
        self.watcher = watcher
        self._hooks.append(self._at_steps(Order.WATCH, watcher.step_begins, watcher.step_ends))

    def _at_steps(self, order: Order, begins: After, ends: After) -> Subscription:
        """Call these around the steps of the program's optimizers."""

        def before(optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if self.program.trains(optimizer):
                begins(optimizer)

        def after(optimizer: Optimizer) -> None:
            if self.program.trains(optimizer):
                ends(optimizer)

        return subscribe(order, before, after)

    def close(self) -> None:
        """End: optimizers step as if there were no engine."""
        for hook in self._hooks:
            hook.remove()
        self.program.close()
        self.part, self.watcher = None, None
        if self.recording is not None:
            self.recording.close()

    def notify(self, text: str) -> None:
        """A line for the user, once."""
        if text in self.notes or (self.draws is not None and text == DROPOUT_NOTE):  # exact draws: untrue
            return
        self.notes.append(text)
        if self.world.rank == 0:
            self._notify(text)

    # Models and optimizers.

    def add_models(self, models: Sequence[nn.Module], plan: Plan, *, piggyback_loss: bool = False) -> None:
        """Apply `plan` to those models that are new, in place. Collective."""
        self.program.add_models(models, plan, piggyback_loss=piggyback_loss)
        self.has_applied = self.has_applied or bool(models)
        dtypes = self.plan.dtypes
        self._stored = dtypes if dtypes.stored != "fp32" else None
        self._narrow = dtypes if dtypes.computed != dtypes.stored or dtypes.computed not in ("fp32", "fp64") else None

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Give an optimizer what the plan has made of its parameters."""
        self.program.add_optimizer(optimizer)
        self._phases.optimizers = True

    @property
    def plan(self) -> Plan:
        """The plan of the models; that of one device as long as there are none."""
        return self.program.plan or Plan()

    # Batches.

    def batches(
        self,
        name: str,
        source: Iterator[Batch],
        size: int,
        *,
        limited: Callable[[int], Iterator[Batch]] | None = None,
        step: Callable[[], int] | None = None,
    ) -> Iterator[Batch]:
        """What `source` gives, while all ranks go on; where the run was asked to stop, `stopped` is set.

        name: what a rank is in the middle of while it loops. size: samples of a batch. limited: gives another source
        whose next batch has at most so many samples. step: the number of the coming step, where the loop knows it.
        """
        outer = torch.get_rng_state()
        watcher, phases = self.watcher, self._phases
        in_progress.add(name)
        self.used_padding = self.stopped = False
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
                if not self._gate.begin():
                    self.stopped = True
                    break
                phases.batch_given(None if step is None else step())
                yield batch
        finally:
            phases.batches_end()
            if watcher is not None:
                watcher.loop_ends()
            self.part = None
            in_progress.discard(name)
            torch.set_rng_state(outer)

    def seed_draws(self, *key: int) -> None:
        """Key this rank's random draws (dropout) by `key`, such as (seed, step), and its rank: a resumed run draws the
        same, ranks draw apart. Rank 0 draws what one device draws."""
        seed = mixed(*key, self.world.rank)
        torch.default_generator.manual_seed(seed)
        if self.world.device.startswith("cuda"):
            torch.cuda.manual_seed(seed)

    def begin(self, part: BatchSlice) -> None:
        """This rank works on `part` from now on."""
        self.part = part
        self.used_padding |= part.total < self.world.size
        if self.watcher is not None:
            self.watcher.batch_given(part)

    # The step.

    def backward(self, loss: Tensor, weight: Tensor | float | None = None) -> Tensor:
        """Add to `.grad` what one device would add for the whole batch; returns the global loss. See `mw.backward`."""
        self.program.begin_backward()
        part = self.part
        with self._watched_backward(self.reduce), self._phases.backward(0 if part is None else part.total):
            mean = self._backward_of_batch(loss, weight, part)
        self._phases.loss(mean)
        if self.watcher is not None:
            self.watcher.loss_known(mean)
        return mean

    def _backward_of_batch(self, loss: Tensor, weight: Tensor | float | None, part: BatchSlice | None) -> Tensor:
        applied = self.program.applied
        if applied is None or applied.reduction is None:
            self.program.check_has_models()
            loss.backward()
            return loss.detach()
        if part is None:
            raise UsageError(
                "mw.backward was called outside a loop over a distributed loader, so the size of the batch is not "
                "known. Give the loader to mw.distribute too, and call mw.backward inside its loop."
            )
        if loss.numel() != 1:
            raise UsageError(
                f"mw.backward needs one number; this loss has shape {tuple(loss.shape)}. Take its mean first."
            )
        weights = StepWeights(self.world.size, applied.coupled_gradients)
        scaled = weights.scale(*unpadded(loss.reshape(()), weight, part.samples), part)
        if weight is None:
            mean = applied.reduction.backward(scaled, reduce=self.reduce, value=scaled.detach())
            assert mean is not None
            return mean
        applied.reduction.backward(scaled, reduce=self.reduce, factor=weights.begin_sum())
        return weights.global_mean().to(loss.dtype)

    def compute(
        self,
        loss_function: Callable[[Any], Any],
        parts: Sequence[Part],
        *,
        where: str,
        key: tuple[int, int],
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> Losses:
        """Leave in `.grad` the gradient of the mean loss over the global batch whose microbatches on this rank are
        `parts`. Returns their losses and weights, still on the device.

        loss_function: gives a microbatch's mean loss, or (mean, weight). where: its name in errors. key: (seed, step),
        for its random draws. scale: of a loss scaler.
        """
        self.program.begin_backward()
        applied, recorder = self.program.applied, current()
        weights = StepWeights(self.world.size, applied is not None and applied.coupled_gradients)
        recorder.samples += parts[0][1].total
        for number, (batch, part) in enumerate(parts):
            self.begin(part)
            draws = None if self.draws is None else self.draws.of_microbatch((*key, number), part)
            with recorder.span("forward"), self.computing(), draws.forward() if draws else NOTHING:
                mean, weight = split_weight(loss_function(self.cast(batch)), part.samples, where)
            last = number == len(parts) - 1
            with self._watched_backward(last), recorder.span("backward"), draws.backward() if draws else NOTHING:
                scaled = scale(weights.scale(mean, weight, part))
                self._reduced_backward(scaled, last, weights.begin_sum() if last and weight is not None else None)
        if self.watcher is not None:
            total, weighed = collectives.all_reduce(total_of(weights.losses)).unbind()
            self.watcher.loss_known(total / weighed)
        return weights.losses

    def _reduced_backward(self, loss: Tensor, last: bool, factor: Callable[[], Tensor] | None) -> None:
        applied = self.program.applied
        if applied is not None and applied.reduction is not None:
            applied.reduction.backward(loss, reduce=last, factor=factor, whole=True)
            return
        loss.backward()
        if factor is not None:
            scale_gradients(self.program.named_parameters().values(), factor())

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """A forward in the dtypes of the plan."""
        return computing(self.world.device, self._narrow) if self._narrow else NOTHING

    def cast(self, batch: Any) -> Any:
        """A batch in the dtype that the plan stores."""
        return batch if self._stored is None else cast_batch(batch, self._stored)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """`backward` inside keeps its gradients on their rank."""
        before, self.reduce = self.reduce, False
        try:
            yield
        finally:
            self.reduce = before

    def sum(self, value: Number) -> Number:
        """`value` added over all ranks, padding left out. See `mw.sum`."""
        total = self._sum(value) if self.world.size > 1 else value
        if self.watcher is not None:
            self.watcher.summed(total)
        return total

    def _sum(self, value: Number) -> Number:
        if self.part is None and self.used_padding:
            raise UsageError(
                f"mw.sum was called after a loop whose last batch had fewer samples than the {self.world.size} ranks: "
                "some rank's value counts a padding sample. Call mw.sum inside the loop, on each batch's value."
            )
        counts = 0 if self.part is not None and self.part.samples == 0 else 1
        if isinstance(value, Tensor):
            return collectives.all_reduce(value.detach().clone() * counts)
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return type(value)(collectives.all_reduce(torch.tensor(value, dtype=dtype) * counts).item())

    # Who looks on.

    def _watched_backward(self, reduce: bool) -> contextlib.AbstractContextManager[None]:
        return self.watcher.backward(reduce) if self.watcher else NOTHING
