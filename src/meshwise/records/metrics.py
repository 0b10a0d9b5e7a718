"""Read a run's metrics and best evaluation, even while the run continues.

`best.safetensors` has the parameters of the best epoch and, in its header, the evaluation. Nothing here imports torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwise.records import folder as names
from meshwise.spec.errors import CheckpointError
from meshwise.spec.words import printable

KEY = "meshwise_best"


class Metrics:
    """The contents of a metrics.jsonl that may still grow. `read_on` reads the lines that were added since its last
    call.

    losses: the loss by step.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / names.METRICS
        self.offset = 0
        """The number of bytes that were read so far."""
        self._forget(0)

    def _forget(self, file: int) -> None:
        self.offset, self._file = 0, file
        self._values: dict[tuple[int, str], list[float]] = {}
        self.losses: dict[int, float] = {}

    def read_on(self) -> Metrics:
        """Read the lines that were added, and return this object.

        If the file was replaced, as when a run is resumed, all lines are read again.
        """
        if not self._path.is_file():  # missing, or a pipe that would block the read
            self._forget(0)
            return self
        try:
            with self._path.open("rb") as file:
                facts = self._path.stat()
                if facts.st_ino != self._file or facts.st_size < self.offset:
                    self._forget(facts.st_ino)
                file.seek(self.offset)
                for line in file:
                    if self._take(line):
                        self.offset += len(line)
        except OSError:
            self._forget(0)
        return self

    def by_name(self) -> dict[str, list[float]]:
        """Return a dict from the name of each metric to its values, in the order in which they were recorded.

        The first metric in the dict is the one to show in lists of runs. Metrics of evaluations come first. Metrics of
        steps follow, in this order: names with "val", "test" or "eval", names with "acc", names with "loss", and all
        others.
        """
        return {name: self._values[place, name] for place, name in sorted(self._values, key=lambda key: key[0])}

    def _take(self, line: bytes) -> bool:
        """Add the values in one line of metrics.jsonl. Return False if the line is not complete yet."""
        try:
            record = json.loads(line.decode(errors="replace"))
        except (ValueError, RecursionError):
            return line.endswith(b"\n")
        if not isinstance(record, dict):
            return True
        test, step, loss = (record.get(name) for name in ("test", "step", "loss"))
        tested = test if isinstance(test, dict) else {}
        for name, value in {**record, **tested}.items():
            if name not in ("epoch", "step", "test") and _is_number(value):
                place = 0 if name in tested else _place(name)
                self._values.setdefault((place, printable(name)), []).append(float(value))
        if isinstance(step, int) and loss is not None and (isinstance(loss, float) or _is_number(loss)):
            self.losses[step] = float(loss)
        return True


def _place(name: str) -> int:
    """Return the priority of a metric in a list of runs, by its name: 1 for a validation metric, 2 for an accuracy, 3
    for a loss, 4 for any other. The metric with the smallest number is shown."""
    words = (("val", "test", "eval"), ("acc",), ("loss",), ("",))
    return next(place for place, some in enumerate(words, 1) if any(word in name.lower() for word in some))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class Best:
    """The best evaluation of a run.

    metric: the name of the metric.
    direction: "min" or "max", which says whether the least or the greatest value is best.
    epoch: the epoch of the evaluation, counted from 1.
    """

    metric: str
    direction: str
    value: float
    epoch: int
    step: int

    def is_beaten_by(self, value: float) -> bool:
        """Return whether another value of the metric is better. NaN is never better."""
        return value < self.value if self.direction == "min" else value > self.value

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g} in epoch {self.epoch}"

    def header(self) -> dict[str, str]:
        """Return the description of this evaluation as metadata for the header of `best.safetensors`."""
        return {KEY: json.dumps(asdict(self))}


def read_best(folder: Path) -> Best | None:
    """Read the best evaluation of the run in `folder`. Returns None if there is none.

    Raises CheckpointError if the file is damaged.
    """
    path = folder / names.BEST
    if not path.is_file():  # missing, or a pipe that would block the read
        return None
    from safetensors import safe_open  # imported here: listing runs does not need it

    try:
        with safe_open(path, "np") as file:
            return Best(**json.loads(file.metadata()[KEY]))
    except Exception as error:  # a damaged file may make safetensors or Best raise anything
        raise CheckpointError(f"{path} cannot be read ({error}). Remove it to start without a best value.") from None
