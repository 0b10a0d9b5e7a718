"""Run Lightning's Trainer on all devices: `mw.distribute(trainer)`.

Then call `trainer.fit(model, loader)`.

The Trainer of each rank runs as if it were alone, and its module sees whole batches, so that losses, metrics and
what a hook or callback does with a batch are the same as on one device. The Trainer and its parts get subclasses
defined here. Nothing is imported from Lightning, so `lightning` and `pytorch_lightning` both work.

    batches     `batch_size` counts the samples of all devices together; each rank holds its rows of every batch
    step        the closure that Lightning passes to an optimizer runs before the step, to average the gradients first
    values      `self.log`, metrics and predictions get plain tensors of the whole batch
    files       rank 0 writes whole tensors, even if a plan divides them; any number of devices can resume from them

Based on the source of Lightning 2.6.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshwise.integrations.lightning_strategy import DistributedPrecision, DistributedStrategy, Ranks
from meshwise.integrations.private_parts import end_epoch, logs_with, take_place
from meshwise.spec.errors import UsageError
from meshwise.training.engine.engine import Engine
from meshwise.training.script.reductions import joined
from meshwise.training.script.trainers import Add, Integration, Share, in_front
from meshwise.training.tracking import tracking
from meshwise.workers.join import rank_context

ALONE = (
    "mw.distribute(trainer) of Lightning does not support {what}. Write L.Trainer(devices=1) without strategy= and "
    "num_nodes=. meshwise run --devices sets the number of devices, and --plan divides the model."
)
WHOLE = "Lightning: the batch_size of each DataLoader is the batch size of all {ranks} devices together."


def _distribute(trainer: Any, engine: Engine, add: Add, share: Share) -> Any:
    if isinstance(trainer, DistributedTrainer):
        return trainer
    world, strategy = rank_context().world, trainer.strategy
    if type(strategy).__name__ != "SingleDeviceStrategy":
        raise UsageError(ALONE.format(what=f"{type(strategy).__name__} ({trainer.num_devices} devices)"))
    ranks = Ranks(engine, trainer, add, share)
    for callback in trainer.callbacks:
        if type(callback).__name__ == "BatchSizeFinder":
            ranks.refuse("BatchSizeFinder", "each rank would find its own batch size; meshwise plan says what fits")
    strategy.global_rank, strategy.local_rank = world.rank, world.local_rank
    strategy.node_rank = world.rank // max(world.local_size, 1)
    sys.modules["lightning_utilities.core.rank_zero"].rank_zero_only.rank = world.rank
    alone = world.size == 1 and rank_context().channel is None
    take_place(trainer, world.device, signals=alone)  # with several ranks, meshwise handles signals, so that all stop
    connector, kept = logs_with(trainer)
    in_front(DistributedTrainer, trainer, ranks)
    in_front(DistributedStrategy, strategy, ranks)
    in_front(DistributedPrecision, strategy.precision_plugin, ranks)
    in_front(DistributedConnector, connector, ranks)
    in_front(DistributedEpoch, trainer.fit_loop.epoch_loop, ranks)
    for results in kept:
        in_front(DistributedResults, results, ranks)
    if world.size > 1:
        engine.notify(WHOLE.format(ranks=world.size))
    return trainer


def _on_ranks(name: str) -> Callable[..., Any]:
    """Return a method that calls the Trainer's method `name`. It raises KeyboardInterrupt if the run is stopped."""

    def run(self: DistributedTrainer, *args: Any, **options: Any) -> Any:
        handler = signal.getsignal(signal.SIGINT)
        try:
            return getattr(super(DistributedTrainer, self), name)(*args, **options)
        except SystemExit as left:
            if self.meshwise.engine.stopped and isinstance(left.__context__, KeyboardInterrupt):
                signal.signal(signal.SIGINT, handler)
                raise left.__context__ from None
            raise

    return run


class DistributedTrainer:
    """Overrides the methods of Lightning's Trainer that run a training, a validation, a test or a prediction."""

    meshwise: Ranks
    fit, validate, test, predict = map(_on_ranks, ("fit", "validate", "test", "predict"))


class DistributedEpoch:
    """Overrides Lightning's loop over an epoch. If `meshwise check` stops an epoch early, this class still steps the
    schedulers and runs the validation, as after a full epoch."""

    meshwise: Ranks

    def run(self: Any, *args: Any, **options: Any) -> None:
        super().run(*args, **options)  # type: ignore[misc]
        if self.meshwise.engine.watcher is not None and not self.done:
            end_epoch(self)


class DistributedConnector:
    """Overrides Lightning's logger connector, which sends logged values to the loggers."""

    meshwise: Ranks

    def epoch_end_reached(self) -> None:
        if self.meshwise.trainer.training:
            self.meshwise.close(True)
        super().epoch_end_reached()  # type: ignore[misc]

    def _evaluation_epoch_end(self) -> None:
        self.meshwise.close(False)
        super()._evaluation_epoch_end()  # type: ignore[misc]

    def log_metrics(self, metrics: dict[str, Any], step: Any = None) -> None:
        super().log_metrics(metrics, step)  # type: ignore[misc]
        numbers = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        if numbers:
            tracking.log(numbers, step=self.meshwise.trainer.global_step)


class DistributedResults:
    """Overrides Lightning's collection of logged values."""

    meshwise: Ranks

    def log(self, fx: str, name: str, value: Any, *args: Any, **options: Any) -> None:
        if not self.meshwise.alone:
            # otherwise Lightning warns of unreduced values
            options |= {"sync_dist": True, "sync_dist_fn": _as_it_is}
        super().log(fx, name, value, *args, **options)  # type: ignore[misc]

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor):
            value = joined(self.meshwise.engine, self.meshwise.plain(value))
        super().update_metrics(key, value, batch_size)  # type: ignore[misc]


def _as_it_is(value: Any, **_: Any) -> Any:
    return value


INTEGRATION = Integration("lightning", _distribute, view="whole")
