"""Set up `view="whole"` for batches, models and backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from meshwise.parallel.splits import dispatch, rules
from meshwise.parallel.splits.axis import SplitPart
from meshwise.parallel.splits.constructors import watch_constructors
from meshwise.parallel.splits.crossing import scatter
from meshwise.parallel.splits.rows_axis import DataAxis
from meshwise.parallel.splits.tensor import SplitTensor
from meshwise.reports.recorder import current
from meshwise.spec.units import seconds_text
from meshwise.spec.words import some
from meshwise.spec.world import World
from meshwise.torch_compat.tree import map_tensors
from meshwise.training.data.order import BatchSlice, world_part
from meshwise.training.engine.engine import Engine
from meshwise.training.guards.own_collectives import OwnCollectives
from meshwise.training.guards.same_program import SameProgram
from meshwise.training.process import once
from meshwise.training.process.session import sized
from meshwise.training.whole.backward import Backwards
from meshwise.training.whole.batches import reads_own_rows, whole_batch
from meshwise.training.whole.call import Divided, divide
from meshwise.training.whole.reads import ask_all_of_masks, watch_reads
from meshwise.transfer import collectives

MADE_BY_THE_LOOP = (
    "divided: nothing yet. The loop makes its batches itself, and every rank computes all of them. Write "
    "x = mw.split(x) where it makes one."
)


def _mean_backward(engine: Engine, loss: Tensor, *_: Any) -> Tensor:
    """Replace `mw.backward`: the loss already covers the whole batch."""
    loss.backward()
    return loss.detach()


class OneDevice:
    """The view `whole` on one device, where every batch is whole: loops draw as without meshwise."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        _begin(engine, Backwards(engine, None), alone=True)

    def add_models(self, models: Any) -> None:
        """Do nothing: no call is divided."""

    divide = add_models

    backward = staticmethod(_mean_backward)

    def divided_rows(self, tree: Any, dim: int = 0) -> Any:
        """Return the batch as it is. In a rehearsal of several ranks, return this rank's rows."""
        world = self.engine.world

        def own(each: Tensor) -> Tensor:
            begin, end = world_part(0, each.shape[dim], world) if each.dim() > dim else (0, 0)
            return each.narrow(dim, begin, end - begin).contiguous() if end > begin else each

        return tree if world.size == 1 else map_tensors(own, tree)

    def loader(self, loader: DataLoader[Any]) -> tuple[World, Callable[[Any, BatchSlice], Any]]:
        """Return the world with which to read a loader, and a function that leaves its batches unchanged."""
        return self.engine.world, lambda batch, part: batch


def _begin(engine: Engine, backwards: Backwards, *, alone: bool) -> None:
    """Begin what the view needs on any number of devices. alone: whether there is only one device."""
    engine.ends.callback(backwards.begin())
    engine.events.see_whole(alone=alone)
    engine.generator.seeded = engine.watcher is not None  # only a check seeds a loop anew at each step
    engine.program.by_construction = True


class WholeView:
    """What a program needs to see whole batches on several ranks."""

    backward = staticmethod(_mean_backward)

    def __init__(self, engine: Engine, *, files: bool) -> None:
        """files: whether the program writes its files on every rank; rank 0's files are kept."""
        self.engine, self.axis = engine, DataAxis()
        self.divided = Divided(engine, self.axis)
        self.backwards = Backwards(engine, self.axis, self._say)
        dispatch.begin()
        watch_reads()
        ask_all_of_masks()
        watch_constructors()
        if files:
            every = collectives.everyone()  # including ranks that split one model
            engine.ends.callback(once.begin(collectives.get_rank(every), collectives.world_size(every)))
        _begin(engine, self.backwards, alone=False)
        self._collectives = OwnCollectives(engine, sized)
        engine.events.listen(self._collectives, only=("backward_begins",))
        engine.events.listen(SameProgram(engine), only=("backward_begins",))

    def add_models(self, models: Iterable[nn.Module]) -> None:
        """Divide the calls of these models. Their plan is applied already."""
        for model in models:
            self._collectives.check(model)
            self.axis.average(model)
            self.backwards.add(list(model.parameters()))
            self.divide(model)

    def divide(self, module: nn.Module) -> None:
        """Divide the calls of a part of a distributed model that the program calls directly."""
        divide(module, self.divided)

    def _say(self) -> None:
        """Tell the user how much of the work on batches is divided, when the third backward begins."""
        verdicts = self.divided.verdicts
        for name, verdict in verdicts.items():
            if verdict.dims is None:
                self.engine.notify(f"{name} runs operator by operator, exact and slower: {verdict.why}.")
            elif verdict.draws:
                self.engine.notify(f"{name} drops out by draws of each rank; --exact-random has those of one device.")
        whole = {name: count for name, count in rules.gathered.items() if name not in rules.READS}
        inside = sum(max(each.nodes, default=0) * each.calls for each in verdicts.values() if each.dims is not None)
        if not (every := dispatch.COUNT[0] + inside):
            self.engine.notify(MADE_BY_THE_LOOP)
            return
        slow = sum(rules.seconds[name] for name in whole) / self.engine.program.backwards
        names = sorted(whole, key=whole.__getitem__, reverse=True)
        told = f"; {some(names)} on whole batches, {seconds_text(slow)} a step at first" if names else ""
        share = min(1 - sum(whole.values()) / every, 0.99 if whole else 1)
        current().divided = f"{share:.0%} of the operators on batches run on each rank's rows{told}."
        self.engine.notify(f"divided: {current().divided}")

    def divided_rows(self, tree: Any, dim: int = 0) -> Any:
        """Return a batch that all ranks hold, divided over them."""

        def divided(each: Tensor) -> Tensor:
            if each.dim() <= dim or isinstance(each, SplitTensor):
                return each
            own = scatter(each, SplitPart(self.axis, dim, each.shape[dim]))
            return own.contiguous() if dim and each.is_contiguous() else own  # a program may call `view` on it

        return map_tensors(divided, tree)

    def loader(self, loader: DataLoader[Any]) -> tuple[World, Callable[[Any, BatchSlice], Any]]:
        """Return the world with which to read a loader, and a function that makes its batches whole."""
        own = reads_own_rows(loader)
        world = replace(self.engine.world, chunks=True) if own else replace(self.engine.world, rank=0, size=1)
        return world, partial(self._whole, read_own=own)

    def _whole(self, batch: Any, part: BatchSlice, read_own: bool) -> Any:
        engine = self.engine
        self.divided.key = engine.draw_key
        engine.draw_key, engine.part = None, replace(part, whole=True)  # the loop draws the same numbers on all ranks
        return whole_batch(batch, part, self.axis, read_own=read_own)
