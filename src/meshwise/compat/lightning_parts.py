"""Reach private parts of Lightning's Trainer: signals, logging, step closure, epoch's end.

Read in Lightning 2.6. Nothing of it is imported. Tested in tests/script/test_lightning.py and
tests/process/test_same_work.py.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwise.compat.fake_device import NAME, TOLD


def take_place(trainer: Any, device: str, *, signals: bool) -> None:
    """Set the device of the Trainer's strategy. signals: whether the Trainer may install its own signal handlers."""
    with torch._C.DisableTorchFunction():  # Lightning finds a rehearsed GPU by the name that a script does
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
    """Run the closure of an optimizer step (forward, backward and gradient clipping), and return its result. plugin:
    Lightning's precision plugin."""
    return plugin._wrap_closure(module, optimizer, closure)


def end_epoch(loop: Any) -> None:
    """End an epoch that was stopped early in the same way as Lightning ends a full epoch: step the schedulers, and run
    the validation if it is due."""
    loop.batch_progress.is_last_batch = True
    loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    if loop._should_check_val_epoch():
        loop.trainer.validating = True
        loop.val_loop.run()
        loop.trainer.training = True
