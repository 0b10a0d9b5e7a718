"""A script that keeps its own loop, watched: what `distribute`, `backward`, `step` and `mw.sum` see, as one side.

The script runs as it is, from the same seeds, with all its casts upcast(). Every loop over a distributed loader is cut
short, and its last batch made ragged: a training loop when the wanted steps are made, an evaluation after three
batches. Later epochs have one batch, so that an evaluation behind them is seen; a script that trains on after `AFTER`
such batches ends there, on all ranks together.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.compat.reducer import default_store
from meshwise.equivalence.across_ranks import numbers_diverge, start_diverges, tensors_diverge
from meshwise.equivalence.collect import collect_run, collect_step, slices_of_ranks
from meshwise.equivalence.model_state import buffers_of, gradients_of, learning_rates_of, parameters_of
from meshwise.equivalence.model_tracer import ModelTracer
from meshwise.equivalence.one_device import trace_of
from meshwise.equivalence.script_seen import Seen
from meshwise.equivalence.trace import StepTrace
from meshwise.equivalence.under_plan import Draws
from meshwise.equivalence.upcast import upcast
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan, at_precision
from meshwise.spec.world import World
from meshwise.training.keyed import Rows
from meshwise.training.order import BatchSlice
from meshwise.training.session import default_engine
from meshwise.transfer.agreement import wait_for_all
from meshwise.workers.join import join

EVALUATED = 3  # batches of an evaluation
AFTER = 30  # backwards behind the steps that are compared
GRACE = 60.0  # seconds in which all ranks must come to the same place of the script


class ScriptEnds(BaseException):
    """The check has seen enough. No error: a script's `except Exception` lets it pass."""


class _Watching:
    """The watcher of the script's engine."""

    def __init__(self, world: World, steps: int, ragged: int, draws: Draws | None, seed: int, folder: Path) -> None:
        self.folder = folder
        self.seen = Seen()
        self._world, self._steps, self._ragged, self._seed = world, steps, ragged, seed
        self._reference = draws
        self._watch: ModelTracer | None = None
        self._model: nn.Module | None = None
        self._step = StepTrace()
        self._rows: list[Rows] = []
        self._now: tuple[Rows, list[list[int]]] | None = None
        self._forward: contextlib.ExitStack | None = None
        self._trained = False  # in this loop
        self._batches = 0  # of this loop
        self._since_step = 0  # batches
        self._a_step = 0  # batches that made the last step
        self._after = 0  # backwards since the last step that is compared
        self._sums = 0
        self._summed = True
        self._meetings = 0

    def __enter__(self) -> None:
        """The script begins."""

    def __exit__(self, *error: object) -> None:
        """It has ended, or failed, maybe in the middle of a forward."""
        self._close(forget=True)

    # The plan.

    def choose_plan(self, plan: Plan, world: World) -> Plan:
        self.seen.plan = plan
        return at_precision(plan if world.size > 1 else Plan(), "fp64")

    # A loop.

    def loop_begins(self) -> None:
        self._loop_is_over()
        self._trained, self._batches, self._summed = False, 0, False
        self.seen.loops += 1

    def _loop_is_over(self) -> None:
        """Before the next loop, or at the end: a sum may come after the loop."""
        if self._batches and not self._trained and not self._summed:
            self.seen.unsummed.append(self.seen.loops)
        self._batches = 0

    def batch_asked(self) -> None:
        self._close(forget=True)
        self._now = None

    def batch_limit(self, batch_size: int) -> int | None:
        if self._trained:
            if self._made >= self._steps:
                return 0
            last = self._made == self._steps - 1 and self._a_step > 0 and self._since_step == self._a_step - 1
        else:
            if self._batches >= EVALUATED:
                return 0
            last = self._batches == EVALUATED - 1
        return min(self._ragged, max(batch_size - 1, 1)) if last else None

    @property
    def _made(self) -> int:
        return len(self.seen.draws)

    def batch_given(self, share: BatchSlice) -> None:
        self._meet("the next batch of a loader")
        if self._watch is None:
            self._start()
        elif self._since_step == 0 and self._made <= self._steps:
            self._changed_between_steps()
        (parts,), (rows,) = slices_of_ranks([share], self._world)
        self._now = rows, parts
        self._batches += 1
        self._since_step += 1
        self._open()

    def loop_ends(self) -> None:
        self._close(forget=True)
        self._now = None

    def _start(self) -> None:
        models = default_engine().program.models
        if not models:
            raise UsageError("mw.distribute was given no model before the first batch. Give it the model that trains.")
        self._model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._watch = ModelTracer(self._model, self._seed, upcast=True)
        side = self.seen.side = trace_of(self._model)
        side.rank_divergence = start_diverges(side)
        self._begin_step()

    def _changed_between_steps(self) -> None:
        """What the script changes behind a step belongs to it: ranks that part here would show in the next forward."""
        if self._world.size == 1 or self._model is None or self.seen.side is None or not self.seen.side.steps:
            return
        apart = {
            **tensors_diverge("parameters", parameters_of(self._model)),
            **tensors_diverge("buffers", buffers_of(self._model)),
        }
        step = self.seen.side.steps[-1]
        step.rank_divergence |= {key: max(far, step.rank_divergence.get(key, 0.0)) for key, far in apart.items()}

    def _begin_step(self) -> None:
        assert self._watch is not None
        self._step, self._rows, self._since_step = StepTrace(), [], 0
        reference = None
        if self._reference is not None:
            reference = self._reference[self._made] if self._made < len(self._reference) else []
        self._watch.begin(self._made, self._rows, reference)

    def _open(self) -> None:
        """From here on the script runs a forward of the batch that it has."""
        self._close(forget=True)
        if self._now is not None and self._watch is not None:
            self._rows.append(self._now[0])
            self._forward = contextlib.ExitStack()
            self._forward.enter_context(self._watch.forward())

    def _close(self, *, forget: bool) -> None:
        if self._forward is None or self._watch is None:
            return
        self._forward.close()
        self._forward = None
        if forget:  # it had no backward
            self._watch.discard()
            self._rows.pop()

    # A step.

    @contextlib.contextmanager
    def backward(self, reduce: bool) -> Iterator[None]:
        self._meet("mw.backward")
        self.seen.backwards += 1
        self._trained = True
        self._after += self._made >= self._steps
        if self._after > AFTER:
            raise ScriptEnds
        if self._forward is None or self._now is None or self._watch is None or self._model is None:
            yield
            return
        self._close(forget=False)
        with self._watch.backward():
            yield
        self._step.samples.append(self._now[1])
        if reduce:
            self._step.gradients = gradients_of(self._model)
            self._step.ready_order = list(dict.fromkeys(self._watch.ready))
        self._open()

    def loss_known(self, loss: Tensor) -> None:
        self._step.loss += float(loss)

    def step_begins(self, optimizer: Optimizer) -> None:
        if self._is_watched(optimizer) and self._model is not None:
            if self.seen.backwards == 0:
                raise UsageError(
                    "optimizer.step() was called, and mw.backward never was. Write mw.backward(loss) instead of "
                    "loss.backward()."
                )
            self._meet("optimizer.step")
            self._close(forget=True)
            self._step.learning_rates = learning_rates_of(optimizer)
            self._step.clipped_gradients = gradients_of(self._model)
            _widen_state(optimizer)

    def step_ends(self, optimizer: Optimizer) -> None:
        if not self._is_watched(optimizer) or self._watch is None or self._model is None:
            return
        self.seen.draws.append(self._watch.draws)
        if self._made <= self._steps and self.seen.side is not None:
            plan = self.seen.plan
            divided = plan is not None and plan.state_divided and not plan.parameters_divided
            collect_step(self._step, self._watch, self._model, optimizer, None, divided=divided)
            self._step.rank_divergence |= numbers_diverge("loss", {"loss": self._step.loss})
            self.seen.side.steps.append(self._step)
        self._a_step = self._since_step
        self._begin_step()
        self._open()

    def _is_watched(self, optimizer: Optimizer) -> bool:
        if self._model is None:
            return False
        ours = {id(p) for p in self._model.parameters()}
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    # An evaluation.

    def summed(self, value: Tensor | float) -> None:
        self._summed = True
        if self.seen.side is None:
            return
        self._sums += 1
        numbers = value.detach().double().reshape(-1).tolist() if isinstance(value, Tensor) else [float(value)]
        for place, number in enumerate(numbers[:16]):
            where = f"[{place}]" if len(numbers) > 1 else ""
            self.seen.side.evaluation[f"mw.sum {self._sums}{where}, after step {self._made}"] = number

    # The end.

    def end(self) -> Seen:
        """The script has ended. Collective."""
        self._loop_is_over()
        self._meet("the end of the script")
        side, watch = self.seen.side, self._watch
        if side is not None and watch is not None:
            collect_run(side, watch)
            side.rank_divergence |= numbers_diverge("evaluation", side.evaluation)
        return self.seen

    def _meet(self, where: str) -> None:
        """All ranks must come to the same place before they talk of it."""
        if self._world.size == 1:
            return
        self._meetings += 1
        key = f"meshwise/check/{self._meetings}/{where}"
        default_store().add(key, 1)
        if not wait_for_all(key, self._world.size, GRACE):
            raise UsageError(
                f"rank {self._world.rank} came to {where} (after step {self._made}), and other ranks of the script did "
                "not. Every rank must run the same loop: look for what depends on mw.rank()."
            )


def _widen_state(optimizer: Optimizer) -> None:
    """An optimizer that has stepped in float32 before its model was upcast()."""
    for p, entry in optimizer.state.items():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim and value.dtype != p.dtype:
                entry[key] = value.to(p.dtype)


def watch_script(
    script: Callable[[], None], steps: int, ragged: int, draws: Draws | None, seed: int, folder: Path
) -> Seen | None:
    """Run `script` in this process for so many optimizer steps, watched. Collective; rank 0 gets what all saw.

    script: runs it, as `python script.py` would. ragged: samples of the last batch of each loop. draws: the random
    draws of one device, on the side that follows it.
    """
    world = join().world
    watching = _Watching(world, steps, ragged, draws, seed, folder)
    engine = default_engine()
    engine.watch(watching)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with upcast(), watching:
            script()
    except ScriptEnds:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        engine.watcher = None
    seen = watching.end()
    return seen if world.rank == 0 else None
