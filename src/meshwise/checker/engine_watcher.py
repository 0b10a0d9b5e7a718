"""Record what an engine does as one side of a check.

The engine runs a job or a script.

The trace of a microbatch's forward pass begins when the engine gives the batch, and ends at the backward. The state
after a step (parameters, optimizer, scheduler) is collected before the next batch, when the step is over.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.checker import across_ranks
from meshwise.checker.contents import reading_of
from meshwise.checker.diagnose_kinds import UNSUMMED
from meshwise.checker.exchanges import is_nan, say_nan
from meshwise.checker.hints import Hints
from meshwise.checker.model_state import gradients_of, learning_rates_of, local_sums, scheduler_numbers
from meshwise.checker.model_tracer import LooksOn, ModelTracer
from meshwise.checker.noise import take_noise
from meshwise.checker.passes import say_step
from meshwise.checker.short_loops import ScriptEnds, ShortLoops
from meshwise.checker.trace import CheckSpec, Draws, ProgramTrace, Reading, StepTrace
from meshwise.checker.whole_view import RowDraws, own_rows
from meshwise.parallel.tensor import UNDIVIDED
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.user_code import user_place
from meshwise.spec.world import World
from meshwise.torch_compat.modules import stored_in
from meshwise.torch_compat.perturbed import open_exchanges
from meshwise.torch_compat.reducer import default_store
from meshwise.training.data.keyed import Rows
from meshwise.training.data.order import BatchSlice
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.loops import LoopRead
from meshwise.training.job.job import Job
from meshwise.transfer.collectives import gather_objects
from meshwise.transfer.reading import wait_for_all
from meshwise.workers import heartbeat
from meshwise.workers.verb_log import log_verb

GRACE = 60.0  # seconds for all ranks to reach the same point of the program, if no launcher watches them


class EngineWatcher:
    """Records everything that an engine does in one run of a check. The attribute `found` is complete after `end`. See
    training/engine/events.py for the events."""

    def __init__(
        self,
        engine: Engine,
        spec: CheckSpec,
        seed: int,
        draws: Draws | None,
        *,
        job: Job | None = None,
    ) -> None:
        self.found = ProgramTrace()
        self._engine, self._world, self._spec, self._seed = engine, engine.world, spec, seed
        self._drawn, self._job = draws, job
        self._loops = ShortLoops(spec.steps, spec.ragged)
        self.tracer: ModelTracer | None = None
        self._model: nn.Module = nn.Module()
        self._batch: tuple[Rows, list[list[int]]] | None = None
        self._contents: Any = None  # this rank's rows of the current batch
        self._loader: Any = None  # the loader that yielded the current batch
        self.reading = Reading()
        """Which data set, random generator and collate function the batches come from."""
        self._forward: contextlib.ExitStack | None = None
        self._place: tuple[int, int] | None = None  # stage and microbatch, in a pipeline
        self._waiting: dict[tuple[int, int], tuple[tuple[Rows, list[list[int]]], RowDraws]] = {}
        self.hints = Hints() if draws is None and job is None else None
        """Collects warnings about likely mistakes in a script on one device. None for a job or under a plan."""
        self._left: dict[str, float] = {}  # sums of values after an optimizer's last step: see `local_sums`
        self._has_loaded = False  # whether a state dict was loaded since an optimizer's last step
        # The last step, with the optimizers that made it. It is kept until the next backward.
        self._stepped: tuple[list[Optimizer], StepTrace] | None = None
        self._open: tuple[list[Optimizer], StepTrace] | None = None  # the same, while other optimizers may take part
        self._stepping = list[Optimizer]()  # optimizers whose step is running, each called by the one before it
        self._done = list[Optimizer]()  # optimizers that have taken part in a step that is not over
        self._reduced: dict[str, float] = {}  # sums of the parameters when gradients were last reduced
        self._meetings = self._sums = 0

    def choose_plan(self, plan: Plan, world: World) -> Plan:
        """Return the plan to apply instead of `plan`."""
        self.found.plan = plan
        kept = ("precision", "param_dtype", "compute_dtype", "grad_dtype")
        alone = Plan(**{name: getattr(plan, name) for name in kept})
        return self._spec.applied(plan if world.size > 1 else alone)

    def follow(self, engine: Engine, model: nn.Module) -> None:
        """Record another engine and its model from now on. They continue from the saved state of the earlier engine."""
        self._engine, self._model = engine, model
        if self.tracer is not None:
            self.tracer.follow(model)

    # Events of a loop over batches.

    def batch_asked(self, loop: LoopRead | None = None) -> None:
        """Record that a loop begins, or asks for its next batch."""
        if loop is not None and loop.given == 0:
            self._loops.loop_begins()
            if self.hints is not None:
                self.hints.loop_begins()
        self._end_forward(discard=True)
        self._batch = None

    def batch_limit(self, batch_size: int) -> int | None:
        """Return the largest number of samples that the next batch may have. 0 ends the loop, None means no limit."""
        return self._loops.limit(batch_size)

    def batch_given(self, part: BatchSlice, batch: Any, *, loader: Any = None, split: bool = False) -> None:
        """Begin to trace the forward pass of a batch that a loop has received."""
        self._wait_for_ranks("mw.split" if split else "the next batch of a loader")
        if self.tracer is None:
            self._start()
        self._see_update_by_hand()
        self.complete_step()
        part, batch = own_rows(self._engine, part, batch)
        (samples,), (rows,) = across_ranks.slices_of_ranks([part], self._world)
        self._batch, self._contents = (rows, samples), batch
        if split:
            self._loader, self.reading = None, Reading(split=True)
        elif loader is not None and loader is not self._loader:
            self._loader, self.reading = loader, reading_of(loader.dataset, loader.collate_fn)
        self._loops.batch_given()
        self._begin_forward()

    def loop_ends(self, loop: LoopRead) -> None:
        """Record that a loop has ended, or that the program left it."""
        self.batch_asked()
        if self.hints is not None:
            self.hints.loop_ends()

    def _start(self) -> None:
        models = self._engine.program.models
        if not models:
            raise UsageError("mw.distribute was given no model before the first batch. Give it the model that trains.")
        self._model = models[0] if len(models) == 1 else nn.ModuleList(models)
        spec, whole = self._spec, self._engine.whole is not None
        self._engine.calls = self.tracer = ModelTracer(
            self._model, self._seed, self._drawn, upcast=spec.in_float64, perturb=spec.perturb, whole=whole
        )
        trace = self.found.trace = self.tracer.trace
        for model in models:
            model.register_load_state_dict_post_hook(LooksOn(self._loads))
            if self.hints is not None:
                self.hints.follow(self.tracer, model)
        trace.notes = tuple(note for note in self._engine.notes if note.startswith(UNDIVIDED))
        trace.rank_divergence = across_ranks.start_diverges(trace)
        if any(gather_objects(across_ranks.cannot_train(trace.rank_divergence))):
            raise ScriptEnds
        self.tracer.begin(0)

    def _loads(self, *_: object) -> None:
        self._has_loaded = True

    # Events of a microbatch.

    def backward_begins(self, loss: Any, *_: object) -> None:
        """Record that a backward pass of this rank's loss begins."""
        own = loss[0] if isinstance(loss, tuple) and loss else loss
        if self.tracer is not None and isinstance(own, Tensor):
            self.tracer.loss_made(own)

    def _begin_forward(self) -> None:
        """Begin to record the forward pass of the newest batch."""
        self._end_forward(discard=True)
        if self._batch is not None and self.tracer is not None:
            self._forward = contextlib.ExitStack()
            number = None if self._place is None else self._place[1]
            self._forward.enter_context(
                self.tracer.forward(self._batch[0], self._contents, self.reading, number=number)
            )

    def _end_forward(self, *, discard: bool) -> None:
        """Stop tracing the open forward pass."""
        if self._forward is None or self.tracer is None:
            return
        self._forward.close()
        self._forward = None
        if discard:
            self.tracer.discard()

    def in_stage(self, stage: int, microbatch: int) -> None:
        """Record which pipeline stage and microbatch the next forward or backward pass belongs to."""
        self._place = stage, microbatch

    def forward_ends(self) -> None:
        """Record that a pipeline stage has ended the forward pass of a microbatch."""
        self._end_forward(discard=False)
        if self._place is not None and self._batch is not None and self.tracer is not None:
            self._waiting[self._place] = self._batch, self.tracer.draws

    @contextlib.contextmanager
    def backward(self, reduce: bool) -> Iterator[None]:
        """Trace the backward pass of a microbatch inside the with block."""
        self._wait_for_ranks("mw.backward")
        self.found.backwards += 1
        self._loops.backward()
        if self.hints is not None:
            self.hints.backward_begins(self._model)
        waiting = None if self._place is None else self._waiting.pop(self._place, None)
        if waiting is not None and self.tracer is not None:
            self._batch, self.tracer.draws = waiting
        if (self._forward is None and waiting is None) or self._batch is None or self.tracer is None:
            yield
            return
        self._end_forward(discard=False)
        self.complete_step()
        self._stepped = None
        if self._stepping:
            self.tracer.forget_gradients()
        with self.tracer.backward(None if self._place is None else self._place[1]):
            yield
        if self._place is None or self._place[1] == len(self.tracer.step.samples):
            self.tracer.step.samples.append(self._batch[1])
        if reduce and self._job is None:
            # If a hook of the backward made the step, its gradients may be gone.
            of_stepped = self.tracer.step.clipped_gradients if self._done else {}
            self.tracer.step.gradients = of_stepped | gradients_of(self._model)
            self._reduced = local_sums(self._model, buffers=False)
        if self._job is None:
            self._begin_forward()

    def loss_known(self, loss: Tensor, scale: float = 1.0) -> None:
        """Add a loss to the recorded loss of the current step."""
        if self.tracer is not None:
            if self._job is not None:  # gradients are complete now, even those summed over pipeline stages
                gradients = gradients_of(self._model)
                self.tracer.step.gradients = {name: g / scale for name, g in gradients.items()}
            self.tracer.step.loss += float(loss)
            if self._done and not self._stepping:
                self._step_is_over()

    # Events of an optimizer step.

    def step_begins(self, optimizer: Optimizer) -> None:
        """Record the state at the beginning of an optimizer step."""
        if self.tracer is None and self._job is not None:
            self._start()  # no batch was read yet: the step's closure asks for the first one
        if self.tracer is None:
            return
        self._wait_for_ranks("optimizer.step")
        step = self.tracer.step if self._open is None else self._open[1]
        if step.samples:  # otherwise the step's closure may need the open forward
            self._end_forward(discard=True)
        self._stepping.append(optimizer)
        step.learning_rates |= learning_rates_of(optimizer, len(step.learning_rates))
        if self._job is None or self._job.clip_norm is not None:
            step.clipped_gradients |= gradients_of(self._model)
            if not step.gradients:  # every backward ran in mw.accumulate(), so gradients are only known now
                step.gradients = step.clipped_gradients
        under_way = open_exchanges() if self._spec.perturb else []
        if under_way and any(is_nan(g) for g in gradients_of(self._model).values()):
            say_nan(step.nan_while_open, "optimizer.step() was called with gradients of", under_way)
        if self._spec.in_float64:
            _widen_state(optimizer)

    def step_ends(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has made its step, unless it is a part of another one's, or of a backward."""
        if self.tracer is None:
            return
        if optimizer in self._stepping:
            del self._stepping[self._stepping.index(optimizer) :]
        self._done.append(optimizer)
        if not (self._stepping or self.tracer.in_backward):
            self._step_is_over()

    def _step_is_over(self) -> None:
        began = self._open is not None or self.tracer is None or self.tracer.step.samples
        if self._engine.whole is not None and not began:  # gradients came from torch.autograd.grad
            with self.backward(False):
                pass
        if self.found.backwards == 0:  # no backward ran, neither before the step nor in its closure
            raise UsageError(
                "optimizer.step() was called before any mw.backward. Write mw.backward(loss) instead of "
                "loss.backward()."
            )
        self._end_forward(discard=True)
        take_noise(self._model, self._spec.noise, self._loops.made - (self._open is not None))
        self._made_step()
        if self._job is None:
            self._begin_forward()

    def _see_update_by_hand(self) -> None:
        """Record a step if a script has updated the parameters itself, without an optimizer."""
        if self._job is not None or self.tracer is None or self._stepped is not None or not self.tracer.step.gradients:
            return
        if any(gather_objects(local_sums(self._model, buffers=False) != self._reduced)):
            self._made_step()

    def _made_step(self) -> None:
        made, self._done = self._done, []
        self._left, self._has_loaded = local_sums(self._model) if self._job is None else {}, False
        if self._open is not None:
            self._open[0].extend(made)
        elif self.tracer is not None:
            self._loops.step_made()
            if self.hints is not None:
                self.hints.step_made()
            compared = self._job is not None or self._loops.compares
            self._open = self._stepped = (made, self.tracer.step) if compared else None
            self.tracer.begin(self._loops.made)

    def complete_step(self) -> None:
        """Record the state of model, optimizers and scheduler after the newest step."""
        if self._stepped is None or self.found.trace is None:
            return
        (optimizers, step), steps = self._stepped, self.found.trace.steps
        if self._open is not None:
            self._open = None
            now = local_sums(self._model) if self._left else {}
            step.changed_behind = {name for name, value in now.items() if value != self._left.get(name, value)}
            step.loaded = self._has_loaded
            across_ranks.collect_step(step, self._model, optimizers, divided=self._divided)
            steps.append(step)
            say_step(len(steps))
        step.scheduler = self._scheduler_of(optimizers) or step.scheduler  # the program may have dropped the scheduler
        step.rank_divergence |= across_ranks.numbers_diverge("scheduler", step.scheduler)

    @property
    def _divided(self) -> bool:
        plan = self.found.plan or self._engine.plan
        return plan.state_divided and not plan.parameters_divided

    def _scheduler_of(self, optimizers: list[Optimizer]) -> dict[str, float]:
        """Return the numbers in the state dicts of these optimizers' learning rate schedulers."""
        known = [s for s in self._engine.given.schedulers if s.optimizer in optimizers]
        found: dict[str, float] = {}
        for scheduler in sorted(known, key=lambda scheduler: type(scheduler).__name__):
            name = f"{type(scheduler).__name__}." if len(known) > 1 else ""
            found |= {f"{name}{key}": value for key, value in scheduler_numbers(scheduler).items()}
        return found

    # Events of a resume, an evaluation, and the end of the program.

    def resumed(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        """Record the state from which a job continues after a resume. Collective."""
        if self.found.trace is None or not self.found.trace.steps:
            return
        state = StepTrace()
        across_ranks.collect_step(state, model, [optimizer], divided=self._divided)
        state.scheduler = scheduler_numbers(scheduler)
        for kind in ("parameters", "buffers", "optimizer_state"):  # share unchanged tensors, to save memory
            before = getattr(self.found.trace.steps[-1], kind)
            now = getattr(state, kind).items()
            setattr(state, kind, {n: before[n] if n in before and torch.equal(t, before[n]) else t for n, t in now})
        self.found.trace.resumed.append((len(self.found.trace.steps), state))

    def joined(self, value: Tensor | float | None) -> None:
        """Record a result of `mw.sum`, to compare it with that of one device."""
        if self.found.trace is None or value is None:
            return
        self._sums += 1
        numbers = value.detach().double().reshape(-1).tolist() if isinstance(value, Tensor) else [float(value)]
        for place, number in enumerate(numbers[:16]):
            where = f"[{place}]" if len(numbers) > 1 else ""
            name = f"mw.sum {self._sums}{where} at {user_place()}, after step {self._loops.made}"
            self.found.trace.evaluation[name] = number

    def unsummed(self, place: str) -> None:
        """Record that the results of the loop at this line were never reduced over the ranks."""
        if self.found.trace is not None:
            # One device has no such value, so this counts as a difference.
            self.found.trace.evaluation[f"the loop at {place}, {UNSUMMED}"] = math.nan

    def shown(self, where: str, text: str) -> None:
        """Record a text that `mw.print` or `mw.log` shows."""
        if self.found.trace is not None:
            self.found.trace.shown.append((where, text))

    def stop(self) -> None:
        """Close an open forward pass, because the program has ended or failed."""
        self._end_forward(discard=True)

    def end(self) -> ProgramTrace:
        """Complete the trace, and return it. Collective."""
        self._engine.events.send("evaluations_end")
        log_verb("the end of the script")
        self._wait_for_ranks("the end of the script")
        trace = self.found.trace
        if trace is not None:
            self._see_update_by_hand()
            self.complete_step()
            across_ranks.collect_run(trace)
            if self.hints is not None:
                by_hand = any(map(_is_by_hand, trace.steps))
                trace.hints = self.hints.end(by_hand=by_hand, per_rank=self._engine.whole is None)
        return self.found

    def _wait_for_ranks(self, where: str) -> None:
        """Wait until all ranks reach the same point in the program. Raise UsageError if some do not."""
        if self._world.size == 1 or self._job is not None:
            return
        self._meetings += 1
        key = f"meshwise/check/{self._meetings}/{where}"
        default_store().add(key, 1)
        beat = heartbeat.enter(where, f"{','.join(map(str, range(self._world.size)))}/check")
        came = wait_for_all(key, self._world.size, GRACE if heartbeat.beat is None else math.inf)
        heartbeat.leave(beat)
        if not came:
            raise UsageError(
                f"rank {self._world.rank} reached {where} (after step {self._loops.made}), but other ranks did not. "
                "Every rank must run the same loop: look for code that depends on mw.rank()."
            )


def _is_by_hand(step: StepTrace) -> bool:
    """Return whether the program changed gradients between backward and step, other than by a factor."""
    names = step.gradients.keys() & step.clipped_gradients.keys()
    pairs = [(step.gradients[name], step.clipped_gradients[name]) for name in names]
    square = math.prod(sum(float((t * t).sum()) for t in side) for side in zip(*pairs, strict=True))
    return sum(float((a * b).sum()) for a, b in pairs) ** 2 < (1 - 1e-9) * square


def _widen_state(optimizer: Optimizer) -> None:
    """Convert an optimizer's state to the dtypes of its parameters."""
    for p, entry in optimizer.state.items():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, Tensor) and value.ndim and value.dtype != p.dtype:
                entry[key] = stored_in(value, torch.float64 if p.is_complex() else p.dtype)
