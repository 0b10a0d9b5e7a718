"""The journal of a run: losses and metrics as they become known, told to the launcher and kept in the run folder.

Losses stay on the device until a log step; then the values of all steps since the last one are gathered from all ranks
and read at once. A loss that is not finite is found there, with the step and the rank where it began.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwise.machine.memory import used_bytes
from meshwise.records import folder as names
from meshwise.records.lines import append_lines, keep_lines
from meshwise.spec.errors import LossError
from meshwise.spec.world import World
from meshwise.training.weighing import Losses, total_of
from meshwise.transfer import collectives

Tell = Callable[..., None]
"""`tell(kind, **facts)`: a message about the run, to whoever shows it."""
LIVE_EVERY = 0.2  # seconds between messages to the live view


class Journal:
    """Writes down what the run reached. Rank 0 writes the metrics, for all ranks."""

    def __init__(self, folder: Path | None, tell: Tell | None, world: World, *, scaled: bool) -> None:
        self._folder, self._tell, self._world, self._scaled = folder, tell, world, scaled
        self._pending: list[tuple[int, int, Losses]] = []
        self._last_finite: tuple[int, float] | None = None
        self._told = 0.0
        self.last_loss: float | None = None
        self.losses: list[float] = []
        self._tensorboard = _tensorboard(folder) if world.rank == 0 else None

    def rewind(self, step: int) -> None:
        """Forget what was written after `step`: the run goes on from there."""
        if self._folder is not None and self._world.rank == 0:
            keep_lines(self._folder / names.METRICS, lambda record: record.get("step", 0) <= step)

    def note(self, epoch: int, step: int, losses: Losses) -> None:
        """Keep a step's losses, unread."""
        self._pending.append((epoch, step, losses))

    def read(self, stop: bool = False) -> bool:
        """Read the losses noted since the last time. Collective. Returns whether any rank wants to stop.

        Raises LossError when a loss is not finite.
        """
        if not self._pending:
            return False
        rows = torch.stack([total_of(losses) for _, _, losses in self._pending])
        wish = torch.full((1, 2), float(stop), dtype=rows.dtype, device=rows.device)
        ranks = collectives.all_gather(torch.cat([rows, wish])).cpu()  # (world, steps + 1, 2)
        records = []
        for (epoch, step, _), row in zip(self._pending, ranks[:, :-1].unbind(1), strict=True):
            total, weight = row.sum(0).tolist()
            loss = total / weight if weight else math.nan
            records.append({"epoch": epoch + 1, "step": step, "loss": loss})
            self._check(loss, step, row)
        self._pending.clear()
        self.last_loss = records[-1]["loss"]
        self.losses.extend(record["loss"] for record in records)
        self._write(records)
        return bool(ranks[:, -1].any())

    def evaluated(self, epoch: int, epochs: int, step: int, metrics: dict[str, float]) -> None:
        """Keep the metrics of an evaluation and tell them."""
        self._write([{"epoch": epoch + 1, "step": step, "test": metrics}])
        if self._world.rank == 0:
            self.tell("evaluated", epoch=epoch + 1, epochs=epochs, metrics=metrics)

    def tell(self, kind: str, **facts: Any) -> None:
        """A message to whoever shows the run, if anybody does."""
        if self._tell is not None:
            self._tell(kind, **facts)

    def due(self) -> bool:
        """Whether the live view is due for news."""
        now = time.monotonic()
        if self._tell is None or now - self._told < LIVE_EVERY:
            return False
        self._told = now
        return True

    def memory(self) -> None:
        self.tell("memory", bytes=used_bytes(self._world.device))

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _check(self, loss: float, step: int, ranks: Tensor) -> None:
        if math.isfinite(loss):
            self._last_finite = (step, loss)
            return
        if self._scaled:
            return  # float16: the loss scaler skips such a step by itself
        bad = [rank for rank, (total, _) in enumerate(ranks.tolist()) if not math.isfinite(total)]
        before = (
            f"it was {self._last_finite[1]:.4g} in step {self._last_finite[0]}"
            if self._last_finite
            else "it never was a number"
        )
        raise LossError(
            f"step {step}: the loss is {loss} on rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}; "
            f"{before}. Lower the learning rate, clip with clip_norm, or look at the samples of that step."
        )

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self._world.rank != 0:
            return
        if self._folder is not None:
            append_lines(self._folder / names.METRICS, records)
        if self._tensorboard is not None:
            for record in records:
                values = record.get("test", {"loss": record.get("loss")})
                for name, value in values.items():
                    self._tensorboard.add_scalar(
                        f"{'test' if 'test' in record else 'train'}/{name}", value, record["step"]
                    )


def _tensorboard(folder: Path | None) -> Any:
    """A TensorBoard writer, where tensorboard is installed."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / names.TENSORBOARD))
