"""Run Lightning's Trainer and Fabric on the CPU workers of a check.

They get the number of ranks in place of their `devices=`, and DDP also in one process.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

from meshwise.checker.plain.reads import Reads
from meshwise.checker.plain.record import Record
from meshwise.checker.short_loops import ScriptEnds
from meshwise.spec.user_code import user_place
from meshwise.torch_compat.program_calls import End, put

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
QUIET = {"enable_progress_bar": False, "enable_model_summary": False}
OTHER = "Lightning's strategy is {name} there, and on CPU workers check can run strategy='ddp' alone"


def on_workers(ranks: int, record: Record, reads: Reads) -> Iterator[End]:
    """Let Lightning run on the workers of a check, and record the numbers that evaluations log."""
    for package in (sys.modules[name] for name in PACKAGES if name in sys.modules):
        logged = dict[str, str]()  # name of a number -> the line that logs it
        yield put([package.LightningModule], "log", functools.partial(_logging, logged))
        trainer = functools.partial(_trainer, ranks, record, reads, package, logged)
        yield put([package.Trainer], "__init__", trainer)
    if "lightning.fabric" in sys.modules:
        yield put([sys.modules["lightning.fabric"].Fabric], "__init__", functools.partial(_making, ranks, record))


def _making(ranks: int, record: Record, plain: Any) -> Any:
    @functools.wraps(plain)
    def init(made: Any, **given: Any) -> None:
        strategy = given.get("strategy", "auto")
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        if not name.lower().startswith(("auto", "ddp")):
            record.refused = OTHER.format(name=name)
            raise ScriptEnds
        of_check = {"accelerator": "cpu", "devices": ranks, "num_nodes": 1, "precision": None}
        plain(made, **given | of_check | {"strategy": "ddp" if name == "auto" else strategy})

    return init


def _trainer(ranks: int, record: Record, reads: Reads, package: Any, logged: dict[str, str], plain: Any) -> Any:
    class Watch(package.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if math.isfinite(steps := trainer.estimated_stepping_batches):
                record.length = int(steps)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            """Let an epoch that the check cuts end as a whole one does: with a validation and a tick."""
            loop = trainer.fit_loop.epoch_loop
            count = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
            loop.batch_progress.is_last_batch = reads.is_last
            trainer.val_check_batch = count + 1 if reads.is_last else float("inf")

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            for name, value in trainer.callback_metrics.items():
                place = next((logged[each] for each in logged if name.startswith(each)), "")
                if place and not trainer.sanity_checking:
                    record.shown.append((place, f"{name} {float(value)}", False))

        on_test_end = on_validation_end

    init = _making(ranks, record, plain)

    @functools.wraps(plain)
    def trainer(made: Any, **given: Any) -> None:
        callbacks = given.get("callbacks") or []
        callbacks = [*(callbacks if isinstance(callbacks, list) else [callbacks]), Watch()]
        init(made, **given | QUIET | {"callbacks": callbacks})

    return trainer


def _logging(logged: dict[str, str], plain: Any) -> Any:
    @functools.wraps(plain)
    def log(module: Any, name: str, *arguments: Any, **named: Any) -> None:
        if not module.trainer.training:
            logged[name] = user_place()
        plain(module, name, *arguments, **named)

    return log
