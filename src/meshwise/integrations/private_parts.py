"""Reach private parts of accelerate, of Lightning's Trainer and of Ray Train.

In accelerate, these are processes, the seeded sampler and ends of loops; in Lightning, signals, logging, the closure of
a step and the end of an epoch; in Ray, the context of a worker and the queue of its errors. None has a public
interface. Checked against accelerate 1.15, Lightning 2.6 and Ray 2.60. None is imported before it is used. Tested in
tests/training/script/test_trainer.py, tests/training/script/test_lightning.py,
tests/training/process/test_same_work.py and tests/launcher/engines/test_ray.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.utils.data import BatchSampler, DataLoader

from meshwise.spec.world import VARIABLES, World
from meshwise.torch_compat.fake_device import NAME, TOLD


def be_alone(world: World, make: Callable[[], object]) -> Any:
    """Call `make`, which creates an Accelerator, as if there were one process. Return accelerate's PartialState."""
    states = import_module("accelerate.state")
    alone = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with mock.patch.dict(os.environ, alone | {"ACCELERATE_TORCH_DEVICE": world.device}, clear=True):
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()
        told = states.PartialState(cpu=world.device == "cpu")
        told.process_index, told.local_process_index = world.rank, world.local_rank
        make()
    return told


def seed_order(loader: DataLoader[Any], seed: int | None) -> None:
    """Replace the random sampler of `loader` with accelerate's SeedableRandomSampler."""
    sampler: Any = loader.sampler
    seeded = import_module("accelerate.data_loader").SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=seed,
    )
    object.__setattr__(loader, "sampler", seeded)  # set directly, because a DataLoader forbids assigning its sampler
    if type(loader.batch_sampler) is BatchSampler:
        loader.batch_sampler.sampler = seeded


def loop_begins(state: Any, loader: Any) -> None:
    """Tell accelerate that a loop over this loader begins, so that it knows when the loader is exhausted."""
    state._add_dataloader(loader)


def loop_ends(state: Any, loader: Any) -> None:
    """Tell accelerate that the loop over this loader has ended."""
    state._remove_dataloader(loader)


def take_place(trainer: Any, device: str, *, signals: bool) -> None:
    """Set the device of the Trainer's strategy. signals: whether the Trainer may install its own signal handlers."""
    # In a rehearsal, torch.device("cuda") would give the fake device here, but Lightning must see the name "cuda".
    with torch._C.DisableTorchFunction():
        trainer.strategy._root_device = torch.device(TOLD if device == NAME else device)
    if not signals:
        trainer._signal_connector.register_signal_handlers = lambda: None


def logs_with(trainer: Any) -> tuple[Any, list[Any]]:
    """Return the Trainer's logger connector, which sends values to the loggers, and the result collections of the
    training loop, its validation loop, and the loops of `validate` and `test`."""
    fit = trainer.fit_loop.epoch_loop
    return trainer._logger_connector, [
        loop._results for loop in (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop)
    ]


def accumulates(trainer: Any) -> bool:
    """Return whether the Trainer accumulates gradients: it makes no optimizer step after the current batch, so that the
    gradients of the next batch are added."""
    return bool(trainer.fit_loop._should_accumulate())


def run_closure(plugin: Any, module: Any, optimizer: Any, closure: Any) -> Any:
    """Run the closure of an optimizer step (forward, backward and gradient clipping), and return its result."""
    return plugin._wrap_closure(module, optimizer, closure)


def end_epoch(loop: Any) -> None:
    """After an epoch that was stopped early, do what Lightning does after a full one: step the schedulers, and run the
    validation if it is due."""
    loop.batch_progress.is_last_batch = True
    loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    if loop._should_check_val_epoch():
        loop.trainer.validating = True
        loop.val_loop.run()
        loop.trainer.training = True


def ray_context() -> Any:
    """Return what Ray Train knows of the worker that this process is. None outside of its workers."""
    module: Any = sys.modules.get("ray.train.v2._internal.execution.context")
    return None if module is None else module._train_context


def tell_ray(context: Any, error: Exception) -> None:
    """Let a worker of Ray Train fail with this error, although its training thread is busy."""
    module = import_module("ray.train.v2._internal.exceptions")
    wrapped = module.UserExceptionWithTraceback(error, str(error))
    context.execution_context.training_thread_runner.get_exception_queue().put(wrapped)


def share_ray_worker(key: str) -> None:
    """Let other workers of Ray kill this one. The handle lies in Ray's own store, which believes its cluster alone."""
    ray, kept = import_module("ray"), import_module("ray.experimental.internal_kv")
    kept._internal_kv_put(key, ray.cloudpickle.dumps(ray.get_runtime_context().current_actor), overwrite=True)


def kill_ray_worker(key: str) -> None:
    """Kill a worker of Ray. Those who wait for its answer learn at once that there is none."""
    ray, kept = import_module("ray"), import_module("ray.experimental.internal_kv")
    ray.kill(ray.cloudpickle.loads(kept._internal_kv_get(key)))


def as_ray_ends(context: Any, work: Callable[[], object]) -> bool:
    """Call `work` in the training thread when the train function has returned. An error of it is the function's. Return
    False if this version of Ray has no such place."""
    runner = context.execution_context.training_thread_runner
    queue = vars(runner).get("_exc_queue")
    if queue is not None:
        runner._exc_queue = _Ending(queue, work)
    return queue is not None


class _Ending:
    """Ray's queue for the error of a train function, to which None is added when the function has returned."""

    def __init__(self, queue: Any, work: Callable[[], object]) -> None:
        self._queue, self._work = queue, work

    def put(self, error: object) -> None:
        if error is None:
            self._work()
        self._queue.put(error)
