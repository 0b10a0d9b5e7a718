"""Reach private parts of Lightning's Trainer: signals, logging, step closure.

Read in Lightning 2.6. Nothing of it is imported. Tested in tests/script/test_lightning.py.
"""

from __future__ import annotations

from typing import Any

import torch


def take_place(trainer: Any, device: str, *, signals: bool) -> None:
    """Its strategy works on this device. signals: whether the Trainer comes around those of the process."""
    trainer.strategy._root_device = torch.device(device)
    if not signals:
        trainer._signal_connector.register_signal_handlers = lambda: None


def logs_with(trainer: Any) -> tuple[Any, list[Any]]:
    """What hands on its logged values, and what its loops keep them in."""
    fit = trainer.fit_loop.epoch_loop
    return trainer._logger_connector, [
        loop._results for loop in (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop)
    ]


def accumulates(trainer: Any) -> bool:
    """Whether the gradients of this batch wait for the next."""
    return bool(trainer.fit_loop._should_accumulate())


def run_closure(plugin: Any, module: Any, optimizer: Any, closure: Any) -> Any:
    """What an optimizer would call in its step: forward, backward, and the clipping behind it."""
    return plugin._wrap_closure(module, optimizer, closure)
