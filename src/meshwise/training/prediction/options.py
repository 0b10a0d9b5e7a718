"""Declare each option of predictions once.

The command line and `mw.predict` use these declarations. Torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

from meshwise.records.folder import RUN, WEIGHTS
from meshwise.spec.arguments import Plain
from meshwise.spec.devices import IN_WORDS
from meshwise.spec.errors import UsageError
from meshwise.spec.options import OfThePlan, Option
from meshwise.spec.plan import Plan
from meshwise.training.job.options import ARGUMENT, PlanText, RunOptions, settle

FORMATS = (".jsonl", ".safetensors")


@dataclass(frozen=True)
class PredictOptions:
    """The options of `meshwise predict` and `mw.predict`.

    predict, collate: functions for a model that is not part of a job, or replacements for the job's functions.
    """

    job: Annotated[
        Any | str,
        Option("mnist-mlp, mnist-cnn, mlp, gpt[:size], or file.py:name", argument=True),
    ]
    data: Annotated[
        str | Path | Any | None,
        Option("what to predict: file.py:name, or a folder for the job's parameter `data`; default: its test set"),
    ] = None
    _: KW_ONLY
    weights: Annotated[str | Path | None, Option("a folder of a run or a model, or a .safetensors file")] = None
    out: Annotated[str | Path | None, Option("a .jsonl or .safetensors file", metavar="FILE")] = None
    devices: Annotated[str | None, Option(f"{IN_WORDS}; default: all accelerators, else one CPU worker")] = None
    plan: Annotated[Plan | PlanText | str | Path | None, Option("a plan file; else replicas", metavar="FILE")] = None
    settings: Annotated[tuple[str, ...], OfThePlan("a field of the plan: tensor=2, precision=bf16")] = ()
    batch_size: Annotated[int | None, Option("samples of the global batch, over all devices")] = None
    args: Annotated[Mapping[str, Plain] | tuple[str, ...], ARGUMENT] = ()
    seed: Annotated[int | None, Option("seed of the start values and the random draws")] = None
    train: Annotated[bool, Option("predict the job's training set, in its own order", name="--train")] = False
    overwrite: Annotated[bool, Option("start over, and overwrite earlier output", name="--overwrite")] = False
    predict: Callable[[Any, Any], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        settle(self, "batch_size")
        if self.train and self.data is not None:
            raise UsageError("--train predicts the job's training set, but --data names another. Use only one option.")
        if self.out is not None and Path(self.out).suffix not in FORMATS:
            raise UsageError(
                f"--out {self.out}: predictions are written as JSON lines or safetensors. Name a file that ends in "
                f"{' or '.join(FORMATS)}."
            )
        if self.weights is not None:
            path = Path(self.weights, WEIGHTS) if Path(self.weights, RUN).exists() else Path(self.weights)
            if not path.exists():
                raise UsageError(
                    f"--weights {self.weights}: {path} does not exist. Name a run that has finished, a folder or a "
                    ".safetensors file. For a run that was stopped, write its newest weights with meshwise weights."
                )
            object.__setattr__(self, "weights", path)
        object.__setattr__(self, "plan", self.run_options.plan)  # reports invalid plan options early

    @property
    def run_options(self) -> RunOptions:
        """The options of `meshwise predict` that `meshwise run` has as well, such as `devices` and `plan`."""
        names = ("devices", "plan", "settings", "batch_size", "seed")
        return RunOptions(**{name: getattr(self, name) for name in names})
