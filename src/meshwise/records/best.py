"""Read the best evaluation of a run, and of which epoch.

`best.safetensors` has the parameters of the best epoch and, in its header, the evaluation. No torch is imported.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwise.records.folder import BEST
from meshwise.spec.errors import CheckpointError

KEY = "meshwise_best"


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
    path = folder / BEST
    if not path.is_file():  # a pipe would be read for ever
        return None
    from safetensors import safe_open  # here: listing runs does not wait for it

    try:
        with safe_open(path, "np") as file:
            return Best(**json.loads(file.metadata()[KEY]))
    except Exception as error:  # of safetensors, the system, or a file of another program's
        raise CheckpointError(f"{path} cannot be read ({error}). Remove it to start without a best value.") from None
