"""Give each rank its share of every batch of a loader.

The loader tracks its position in the epoch, its state and its loop.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from meshwise.spec.errors import UsageError
from meshwise.torch_compat.dispatch import as_rehearsed
from meshwise.training.data.generators import TORCH, Draws, OrderGenerators, States, packed, unpacked
from meshwise.training.data.order import BatchSlice
from meshwise.training.data.split_loader import LoaderSpec
from meshwise.training.data.wrapped_loader import Wrapper
from meshwise.training.engine.engine import Engine
from meshwise.training.engine.loops import LoopRead
from meshwise.training.engine.seeds import seed_generators
from meshwise.training.engine.steps import batches as read_batches
from meshwise.training.slips.in_a_run import says_resumed
from meshwise.transfer.prefetch import prefetch
from meshwise.transfer.splitmix import mixed
from meshwise.workers.verb_log import BATCH, left_loop, log_verb

NESTED = (
    "a loop over a loader went on after another loop over the same loader had begun inside it, and missed batches. "
    "Make a second DataLoader over the same data set for the inner loop, and pass it to mw.distribute too."
)
_loaders = itertools.count(1)  # gives a loader the same number on all ranks, which make their loaders in the same order


class OverLoader:
    """Stands in for the loader in `_loader`, and takes missing attributes from it."""

    _loader: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)


class DistributedLoader(OverLoader):
    """Yields every batch of the user's DataLoader, whole or, with view="rank", this rank's slice. Its `len` and other
    attributes are those of the DataLoader.

    The order of the samples is the one that torch's DataLoader would draw at this point of the program on rank 0."""

    def __init__(
        self,
        loader: DataLoader[Any],
        spec: LoaderSpec,
        seed: int,
        engine: Engine,
        whole: Callable[[Any, BatchSlice], Any] | None = None,
    ) -> None:
        """whole: turns what this rank has read into the whole batch. None if the program sees this rank's rows."""
        self.dataset, self.batch_size = loader.dataset, spec.batch_size
        self._loader, self._spec, self._seed, self._engine = loader, spec, seed, engine
        self._whole = whole
        self._epoch, self._index, self._batches_given, self._running = 0, 0, 0, False
        self.start = 0
        """How many batches of the epoch were done when the run was resumed, or 0. It is 0 in later epochs. Count with
        `enumerate(loader, loader.start)`. `len(loader)` counts the whole epoch."""
        self._generators = OrderGenerators(engine.generator, spec.drawn or (TORCH,))
        self._order: States | None = None  # the generator states from which this epoch's order was drawn
        self._number = next(_loaders)
        self._loop: LoopRead | None = None  # the newest loop over this loader
        own_batches = type(loader.batch_sampler) is not BatchSampler
        self._whole_batches = loader.drop_last or own_batches  # whether the program relies on complete batches
        self.in_batch = False
        """Whether the program is working on a batch of this loader now."""
        self.given_at = -1
        """How many optimizer steps had ended when the loader yielded the current batch."""
        self._before = (0, 0)  # samples and batches of this epoch before the current batch
        engine.given.loaders.add(self)
        self.wrapper: Wrapper | None = None
        """The wrapper through which the program reads this loader, if there is one."""

    def __len__(self) -> int:
        if self._spec.length is None:
            raise TypeError("this loader has no len(), because its data set or sampler has no length")
        return self._spec.length

    @property
    def place(self) -> tuple[int, int]:
        """How many epochs are finished, and how many samples of the current epoch were read by all ranks together."""
        return self._epoch, self._index

    @property
    def at_end(self) -> bool:
        """Whether all batches of this epoch were yielded. False if the number of batches is unknown."""
        return self._spec.length == self._batches_given

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position: the epoch, how many samples and batches of the epoch were yielded, and two
        states of the random generators. The first is their state when the order of this epoch was drawn, the second
        their state now. A run on any number of devices can resume from the position."""
        state: dict[str, Any] = {"epoch": self._epoch, "index": self._index, "batches": self._batches_given}
        order = {} if self._order is None else {"order": packed(self._order)}
        return state | order | {"generators": packed(self._generators.states())}

    def go_to(self, epoch: int, batches: int) -> None:
        """Make the next loop begin in epoch `epoch`, after `batches` batches, with a newly drawn order."""
        self._running, self._order = False, None
        self._epoch, self._index, self._batches_given = epoch, batches * (self.batch_size or 1), batches

    def state_beside(self) -> dict[str, Any]:
        """Return the `state_dict` to save for this loader if it is not the loader of the training loop. An example is
        `other` in `zip(loader, other)`.

        If the current batch is not trained on yet, the saved position is before this batch, so that a resumed run reads
        it again. If the program has left the loop over this loader early, the epoch counts as finished."""
        state = self.state_dict()
        if self.in_batch and self.given_at == self._engine.phases.done:
            return state | dict(zip(("index", "batches"), self._before, strict=True))
        if self._running and not self.in_batch:
            state.pop("order", None)
            return state | {"epoch": self._epoch + 1, "index": 0, "batches": 0}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next loop over this loader resume from `state`. The program's random generators are restored too, so
        that later epochs keep their order."""
        self._epoch, self._index = int(state["epoch"]), int(state["index"])
        self.start = self._batches_given = int(state["batches"])
        self._running, self._order = False, unpacked(state["order"]) if "order" in state else None
        self._generators.set_states(unpacked(state["generators"]))

    def __iter__(self) -> Iterator[Any]:
        fed = None if self.wrapper is None else self.wrapper.take()
        return self.begin_loop() if fed is None else fed

    def begin_loop(self) -> Iterator[Any]:
        """Return an iterator over the batches of an epoch, or over the rest of them after a resume."""
        self.leave_epoch()
        for state in self._engine.given.loop_states:
            state.epoch_begins(self)
        self._running = True
        if self.start:
            self._engine.notify(says_resumed(self.start))
        log_verb(BATCH, self._number, self._epoch, 1)
        loader = self._loader
        if self._order is None and not (loader.persistent_workers and self._epoch) and not self._spec.draws_base_seed:
            with self._engine.generator.drawing():
                # torch's DataLoader draws a base seed here. Draw it too, so that later draws are the same.
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        batches = self._batches(self._read(None) if loader.num_workers or self.wrapper is not None else None)
        self._engine.given.loops.add(batches)
        return batches

    def leave_epoch(self) -> None:
        """End the epoch, if the program has left its loop before the last batch."""
        if self._running:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._running = False
        self._epoch, self._index, self._batches_given, self._order = self._epoch + 1, 0, 0, None
        self.start = 0

    def _batches(self, source: Iterator[tuple[Any, Any]] | None) -> Generator[Any, None, None]:
        engine, name, loop = self._engine, f"epoch {self._epoch} of a loader", LoopRead(self._number)
        batches = read_batches(engine, name, source or self._read(None), self.batch_size, limited=self._read, loop=loop)
        of_epoch, states, self._loop = mixed(self._seed, self._epoch), engine.given.loop_states, loop
        with contextlib.closing(batches):
            for batch, part in batches:
                engine.draw_key = key = of_epoch, self._index
                self.given_at, self._before = engine.phases.steps, (self._index, self._batches_given)
                self._index += self.batch_size if self._spec.own else part.total
                self._batches_given += 1
                batch = batch if engine.stored is None else engine.cast(batch)
                engine.reads.begin(part, loop)
                self.in_batch, engine.part = True, part
                if engine.watcher is not None:
                    engine.watcher.batch_given(part, batch, loader=self._loader)
                try:
                    if self._whole is not None:
                        yield self._whole(batch, part)
                    elif engine.draws is None or engine.watcher is not None:
                        seed_generators(engine.world.device, mixed(*key, engine.world.rank))  # as in `seed_draws`
                        yield batch
                    else:
                        with engine.draws.of_microbatch((*key, 0), part).forward():
                            yield batch
                except GeneratorExit:
                    self._left(loop)
                    raise
                self.in_batch = False
                log_verb(BATCH, self._number, self._epoch, loop.given + 1)
                for state in states:
                    state.step_ends(self)
        self._over(loop)

    def _left(self, loop: LoopRead) -> None:
        """Record that the program has left the loop before its last batch."""
        self.in_batch, self.start = False, 0
        left_loop(loop.given)
        for state in self._engine.given.loop_states:
            state.epoch_ends(self, early=True)

    def _over(self, loop: LoopRead) -> None:
        """End the epoch after the last batch. Stop the run if this was requested."""
        if self._loop is not loop:
            raise UsageError(NESTED)
        engine, states = self._engine, self._engine.given.loop_states
        if engine.stopped:
            for state in states:
                state.stops()
            raise engine.gate.stop(engine.phases.step, self._epoch + 1)
        for state in states:
            state.epoch_ends(self, early=False)
        self._end_epoch()

    def _read(self, limit: int | None) -> Iterator[tuple[Any, Any]]:
        """Return an iterator over (batch, this rank's slice of the batch) for the rest of the epoch."""
        if limit == 0:
            return iter(())
        if limit is not None and self._whole_batches:
            limit = sys.maxsize
        read = as_rehearsed(self._spec.pairs(self._draws(), self._epoch, self._index, limit))
        pairs = prefetch(read, self._engine.program.device)
        return pairs if self.wrapper is None else self.wrapper.pairs(pairs)

    def _draws(self) -> Draws:
        """Return the object that draws the order of this epoch."""
        if self._order is not None:
            return self._generators.draws(self._order, again=True)
        together = self._spec.drawn and not self._spec.own
        self._order = self._generators.take_rank_0s() if together else self._generators.states()
        return self._generators.draws(self._order, again=False)
