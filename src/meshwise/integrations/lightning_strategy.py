"""Override Lightning's strategy, so that it trains on several ranks."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from meshwise.integrations.private_parts import accumulates, run_closure
from meshwise.integrations.trainer_loader import Reader
from meshwise.parallel.splits.dispatch import wholes
from meshwise.spec.errors import UsageError
from meshwise.torch_compat.tree import map_kind, tensors_in
from meshwise.training.data.wrapped_loader import loader_inside
from meshwise.training.recovery.collect import collected
from meshwise.training.script.distributed_loader import OverLoader
from meshwise.training.script.reductions import joined
from meshwise.training.script.trainers import REFUSED, SAVED, OfTrainer, in_front
from meshwise.transfer import collectives
from meshwise.workers.join import rank_context

STATES = "meshwise"
"""The key of the loaders' states in Lightning's checkpoints. Lightning without meshwise ignores it."""


@dataclass(eq=False)
class Ranks(OfTrainer):
    """The state shared by all meshwise classes that override methods of Lightning's Trainer and its parts."""

    states: list[dict[str, Any]] = field(default_factory=list)
    open: dict[bool, WeakSet[Any]] = field(default_factory=lambda: {True: WeakSet(), False: WeakSet()})

    @property
    def divided(self) -> bool:
        return self.engine.plan.parameters_divided or self.engine.plan.state_divided

    def close(self, training: bool) -> None:
        """Close loops that Lightning no longer reads: over training loaders if `training`, otherwise over others."""
        for batches in list(self.open[training]):
            batches.close()
        self.open[training].clear()

    def refuse(self, what: str, instead: str) -> None:
        """On several devices, raise UsageError for a feature whose results would differ from one device."""
        if not self.alone:
            raise UsageError(REFUSED.format(ranks=self.engine.world.size, what=what, instead=instead))

    def plain(self, tree: Any) -> Any:
        """Return `tree` with divided tensors replaced by whole plain tensors. Collective."""
        return self.engine.program.plain(wholes(tree))


# An ABC like Lightning's strategies: an object's class can only be changed to a class of the same layout.
class DistributedStrategy(ABC):
    """Overrides methods of Lightning's strategy for a single device."""

    meshwise: Ranks

    # Ranks and devices.

    @property
    def is_global_zero(self) -> bool:
        return rank_context().world.rank == 0

    def barrier(self, *args: Any, **options: Any) -> None:
        collectives.barrier(collectives.everyone())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return collectives.gather_objects(obj)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = collectives.gather_objects(bool(decision))
        return False not in votes if all else True in votes

    def reduce(self, tensor: Any, *args: Any, **options: Any) -> Any:
        return self.meshwise.plain(tensor)

    all_gather = reduce

    # The model and its optimizers.

    def connect(self, model: Any) -> None:
        if "dataloader_iter" in inspect.signature(model.training_step).parameters:
            self.meshwise.refuse("training_step(dataloader_iter)", "take the argument batch instead")
        super().connect(model)  # type: ignore[misc]

    def _setup_model(self, model: Any) -> Any:
        ranks, model = self.meshwise, super()._setup_model(model)  # type: ignore[misc]
        ranks.add([model])
        for child in model.children():  # a training step may call a submodule directly, without the module's forward
            ranks.engine.whole.divide(child)
        if not ranks.alone or ranks.engine.watcher is not None:  # a check needs the metrics of one device, too
            _see_all_rows(ranks, model)
        return model

    def model_to_device(self) -> None:
        if not self.meshwise.divided:  # a divided model is on its device already
            super().model_to_device()  # type: ignore[misc]

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self.meshwise.engine.gate.saves |= trainer.checkpoint_callback is not None  # whether a stop saves a state
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]  # type: ignore[attr-defined]
        for each in [*self.optimizers, *(one for one in schedulers if isinstance(one, LRScheduler))]:  # type: ignore[attr-defined]
            self.meshwise.share(each)

    def teardown(self: Any) -> None:
        self.meshwise.close(True)
        self.meshwise.close(False)
        self.meshwise.engine.given.waits = False  # may still be set from a training that ended inside a step
        kept = self._lightning_module, self._optimizers
        if self.meshwise.divided:  # the parts of a divided model stay on their devices
            self._lightning_module, self._optimizers = None, []
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self._lightning_module, self._optimizers = kept

    # Loaders.

    def process_dataloader(self, dataloader: Any) -> Any:
        ranks = self.meshwise
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        if not isinstance(dataloader, DataLoader) and loader_inside(dataloader) is None:
            ranks.refuse(f"a {type(dataloader).__name__} of batches", "pass a DataLoader")
            return dataloader
        shared = DistributedLoader(ranks.share(dataloader), ranks)
        if ranks.trainer.training and ranks.states:
            shared.load_state_dict(ranks.states.pop(0))
        return shared

    # Steps.

    def validation_step(self, *args: Any, **options: Any) -> Any:
        return self.meshwise.plain(super().validation_step(*args, **options))  # type: ignore[misc]

    def test_step(self, *args: Any, **options: Any) -> Any:
        return self.meshwise.plain(super().test_step(*args, **options))  # type: ignore[misc]

    def predict_step(self, *args: Any, **options: Any) -> Any:
        return self.meshwise.plain(super().predict_step(*args, **options))  # type: ignore[misc]

    def backward(self, *args: Any, **options: Any) -> Any:
        engine, waits = self.meshwise.engine, accumulates(self.meshwise.trainer)
        engine.given.waits, before, engine.reduce = waits, engine.reduce, not waits
        try:
            return super().backward(*args, **options)  # type: ignore[misc]
        finally:
            engine.reduce = before

    def optimizer_step(self: Any, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        ranks, plugin = self.meshwise, self.precision_plugin
        if getattr(plugin, "scaler", None) is not None or (ranks.alone and ranks.engine.watcher is None):
            return super().optimizer_step(optimizer, closure, model, **options)  # type: ignore[misc]
        if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
            ranks.refuse(type(optimizer).__name__, "it computes the loss several times a step. Use another optimizer")
        value = run_closure(plugin, model or self.lightning_module, optimizer, closure)
        optimizer.step(**options)
        return value

    # Files.

    def lightning_module_state_dict(self) -> Any:
        state = super().lightning_module_state_dict()  # type: ignore[misc]
        return collected(state) if self.meshwise.divided else state

    def optimizer_state(self, optimizer: Any) -> Any:
        state = super().optimizer_state(optimizer)  # type: ignore[misc]
        return collected(state) if self.meshwise.divided else state

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **options: Any) -> None:
        loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        checkpoint[STATES] = {"loaders": loop.pop("combined_loader", [])}
        super().save_checkpoint(checkpoint, *args, **options)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **options: Any) -> Any:
        checkpoint = super().load_checkpoint(*args, **options)  # type: ignore[misc]
        self.meshwise.states = list(checkpoint.get(STATES, {}).get("loaders", []))
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # type: ignore[misc]
        trainer, saves = self.meshwise.trainer, self.meshwise.trainer.checkpoint_callback
        if self.meshwise.engine.stopped and trainer.state.fn == "fit" and getattr(saves, "dirpath", None):
            if trainer.validating:  # repeat the whole validation, as if it had been stopped before its first batch
                progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
                for each in (progress.total, progress.current):
                    each.reset()
                    each.ready = each.started = 1
            path = Path(saves.dirpath) / f"last{saves.FILE_EXTENSION}"
            trainer.save_checkpoint(path)
            self.meshwise.engine.notify(SAVED.format(path, f'fit(…, ckpt_path="{path}")'))


class _Ahead:
    """An iterator that lets Lightning ask for a batch before the batch is read. It yields placeholders instead of
    batches."""

    def __init__(self, batches: Iterator[Any], reader: Reader) -> None:
        self._batches, self._reader, self._given = batches, reader, 0

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> _Ahead:
        if len(self._reader.look(self._given + 1)) <= self._given:
            raise StopIteration
        self._given += 1
        return self

    def read(self) -> Any:
        """Read the next batch from the loader, and return it."""
        self._given -= 1
        return next(self._batches)


class DistributedPrecision:
    """Overrides Lightning's precision plugin. Lightning passes each batch to the plugin just before it processes the
    batch. If the batch is a placeholder of `_Ahead`, the plugin reads the real batch now."""

    meshwise: Ranks

    def convert_input(self, data: Any) -> Any:
        return super().convert_input(map_kind(_Ahead, _Ahead.read, data))  # type: ignore[misc]


class DistributedLoader(OverLoader):
    """A distributed loader for Lightning."""

    def __init__(self, loader: Any, ranks: Ranks) -> None:
        self._loader, self._ranks, self._reader = loader, ranks, None
        with contextlib.suppress(TypeError):
            len(loader)
            return
        self._reader = loader.wrapper = Reader()

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self._loader)
        self._ranks.open[bool(self._ranks.trainer.training)].add(batches)
        return batches if self._reader is None else _Ahead(batches, self._reader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position. After the last batch of an epoch, this is the beginning of the next epoch."""
        state, progress = self._loader.state_dict(), self._ranks.trainer.fit_loop.epoch_loop.batch_progress
        if progress.is_last_batch or progress.current.ready >= self._ranks.trainer.num_training_batches:
            state.pop("order", None)
            state |= {"epoch": state["epoch"] + 1, "index": 0, "batches": 0}
        return state  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state_dict` returned."""
        self._loader.load_state_dict(state)
        self._loader.start = 0


class DistributedMetric:
    """Overrides methods of a torchmetrics metric. Every rank updates the metric with the rows of all ranks, so the
    ranks need not exchange the metric's state."""

    meshwise: Ranks

    def update(self, *args: Any, **options: Any) -> None:
        super().update(*self.meshwise.plain(args), **self.meshwise.plain(options))  # type: ignore[misc]

    def compute(self) -> Any:
        value = super().compute()  # type: ignore[misc]
        for each in tensors_in(value):
            joined(self.meshwise.engine, each)
        return value

    def sync(self, *args: Any, **options: Any) -> None:
        """Do nothing, because the metric on every rank has the rows of all ranks already."""


def _see_all_rows(ranks: Ranks, model: nn.Module) -> None:
    for module in model.modules():
        names = {(cls.__module__, cls.__name__) for cls in type(module).__mro__}
        if ("torchmetrics.metric", "Metric") in names and not isinstance(module, DistributedMetric):
            in_front(DistributedMetric, module, ranks)
            metric: Any = module
            state = metric.__getstate__()
            del metric.__dict__["update"], metric.__dict__["compute"]
            metric.__setstate__(state)  # wraps update and compute again, now those of DistributedMetric
