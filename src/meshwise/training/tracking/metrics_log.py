"""Send losses and metrics to the launcher, metrics.jsonl and trackers.

Losses and metrics are sent as they become known.

The losses of steps stay on the device until a step that logs. Then `sync` gathers, from all ranks, the losses since the
last `sync`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwise.records import folder as names
from meshwise.records.files import Record, read_lines
from meshwise.spec.errors import LossError
from meshwise.spec.words import ranks_text
from meshwise.spec.world import World
from meshwise.training.engine.weighing import Losses, totals_of
from meshwise.training.tracking.trackers import Tracker
from meshwise.training.tracking.tracking import Tracking
from meshwise.transfer import collectives
from meshwise.workers.environment import attempt

Send = Callable[..., None]
"""A function `send(kind, **facts)` that sends a message about the run to the launcher's display."""
LIVE_EVERY = 0.2  # seconds between two messages to the live view


class MetricsLog:
    """Records the losses and metrics of a run. Rank 0 writes them for all ranks."""

    def __init__(
        self,
        folder: Path | None,
        send: Send | None,
        world: World,
        trackers: Sequence[str | Tracker] = (),
        *,
        scaled: bool,
    ) -> None:
        """folder: the run folder, to which metrics and, if tensorboard is installed, its events are written."""
        self._folder, self._send, self._world, self._scaled = folder, send, world, scaled
        self.pending: list[tuple[int, int, Losses]] = []
        """Epoch, step and losses of each step since the last `sync`. The losses are still on their device."""
        self.live_due = math.inf if send is None else 0.0
        """When the next message to the live view is due, on the clock `time.monotonic`."""
        self.last_loss: float | None = None
        self.losses: list[float] = []
        self.evaluated = -1
        """The newest step for which evaluation metrics were written. -1 before the first."""
        usual = ["tensorboard"] if folder is not None and find_spec("tensorboard") else []
        first = world.rank == 0
        self.tracking = Tracking(folder if first else None, [*usual, *trackers] if first else (), self.note)

    def begin(self, step: int) -> None:
        """Open the trackers, and remove the records of steps after `step`, which the run will repeat."""
        if self._folder is not None and self._world.rank == 0:
            names.keep_metrics(self._folder, attempt(), lambda record: record.get("step", 0) <= step)
            lines = read_lines(self._folder / names.METRICS)
            self.evaluated = max([line["step"] for line in lines if "test" in line and "step" in line], default=-1)
        self.tracking.open(step)
        if self._world.size > 1:  # wait here until rank 0 has opened the trackers, so that the first step does not wait
            self.evaluated = collectives.broadcast_object(self.evaluated)

    def sync(self) -> None:
        """Gather the losses since the last call from all ranks, check that they are finite, and write them."""
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        totals = collectives.all_gather(totals_of([losses for _, _, losses in pending]), of="losses").cpu().unbind(1)
        records: list[Record] = [
            {"epoch": epoch + 1, "step": step, "loss": self._finite(step, of_ranks)}
            for (epoch, step, _), of_ranks in zip(pending, totals, strict=True)
        ]
        self.tracking.write(records, [({"train/loss": each["loss"]}, each["step"]) for each in records])
        self.losses += [each["loss"] for each in records]
        self.last_loss = self.losses[-1]

    def add_evaluation(
        self, epoch: int, epochs: int, step: int, metrics: dict[str, float], *, best: bool = False, inside: bool = False
    ) -> None:
        """Write and send the metrics of an evaluation."""
        point = {f"test/{name}": value for name, value in metrics.items()}, step
        self.evaluated = step
        self.tracking.write([{"epoch": epoch + 1, "step": step, "test": metrics}], [point])
        if self._world.rank == 0:
            where = {"inside": step} if inside else {}
            self.send("evaluated", epoch=epoch + 1, epochs=epochs, metrics=metrics, best=best, **where)

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message to the display of the run, if there is one."""
        if self._send is not None:
            self._send(kind, **facts)

    def note(self, text: str) -> None:
        """Send a line to the display of the run, to show to the user."""
        self.send("note", text=text)

    def tell(self, text: str) -> None:
        """Send a line, from rank 0 only, that is shown to the user and kept in the run's record and report."""
        if self._world.rank == 0:
            self.send("told", text=text)

    def _finite(self, step: int, of_ranks: Tensor) -> float:
        """Return the loss of a step over all ranks. Raise LossError if it is not finite."""
        total, weight = of_ranks.sum(0).tolist()
        loss: float = total / weight if weight else math.nan
        if not self._scaled and not math.isfinite(loss):  # float16's loss scaler skips such a step itself
            bad = [rank for rank, (total, _) in enumerate(of_ranks.tolist()) if not math.isfinite(total)]
            raise LossError(
                f"step {step}: the loss is {loss} on {ranks_text(bad)}. Lower the learning rate, clip with clip_norm, "
                "or look at the samples of that step."
            )
        return loss
