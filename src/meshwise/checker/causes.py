"""Define every cause that a check can name.

Every cause has a title and an explanation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class CauseKind(Enum):
    """A kind of mistake that `meshwise check` can name as the likely cause of a difference."""

    LOSS_WEIGHTING = (
        "loss weighting",
        "the ranks' means are not weighted by the number of items that each mean covers",
    )
    COUPLED = "coupled samples", "the loss compares samples with each other, and each rank has only its own"
    MISSING_REDUCTION = "missing reduction", "gradients of some ranks or microbatches are not in the sum"
    DOUBLED_REDUCTION = (
        "doubled reduction",
        "values are summed once too often, divided once too often, or not divided",
    )
    WRONG_GROUP = "wrong group", "a sum over ranks uses another group than the ranks that have the parts"
    SCALED_BETWEEN = "scale between microbatches", "gradients are scaled while a step still adds to them"
    SKIPPED = "skipped step", "the optimizer leaves out an update that one device makes"
    BATCH_NORM = (
        "batch-norm statistics",
        "a normalization uses the samples of one rank, not of the global microbatch",
    )
    DROPOUT = "dropout masks", "the random numbers differ from those of one device, or of a block's first run"
    PADDING = "padded or repeated sample", "a sample counts twice, or not at all"
    BATCH_SIZE = "batch size depends on devices", "the loader's batch_size is global, over all devices"
    DATA_ORDER = "data order", "a step reads other samples, or in another order"
    CONTENTS = "batch contents", "the values of a sample depend on which rank reads it, and when"
    CLIP_NORM = "clip norm", "gradients are clipped to another norm, or not exactly once before the step"
    MASTER_WEIGHTS = (
        "master weights",
        "parameters or the optimizer's state are kept in a lower precision between steps",
    )
    LOWER_PRECISION = "lower precision", "gradients are computed or reduced in a lower precision"
    TIED_WEIGHT = "tied weight", "a parameter that two modules share is not shared on both sides"
    STALE_OPTIMIZER = (
        "optimizer bound to old parameters",
        "the optimizer updates parameters that are not the model's",
    )
    EXTRA_TICKS = "scheduler ticks twice", "the scheduler takes more ticks than there are steps"
    SCHEDULER = "scheduler", "the scheduler does not take one tick a step"
    SCALED_LEARNING_RATE = "learning rate times devices", "it depends on the number of devices; the batch is global"
    LEARNING_RATE = "learning rate", "the optimizer uses another learning rate"
    START_VALUES = "start values", "the model starts from other values"
    RESUMED = "state after a resume", "the state after a resume differs from the state before it"
    NOT_FINITE = "not finite", "a value is NaN or infinite under the plan alone"
    RACE = "race", "a value is used before its exchange has ended, or changed while it is under way"
    MODE = "training mode", "a module is in evaluation mode in a step of the training, or not where it should be"
    BUFFER = "buffer", "a buffer is updated on one side only, or by each rank by itself"
    MODULE = "module", "a module gives another output for the same input"
    LOSS = "loss", "the loss differs although the outputs are the same"
    BACKWARD = "backward", "the backward of a module gives another gradient for the same forward"
    OPTIMIZER_STEP = "optimizer step", "the optimizer makes another update from the same gradients"
    EVALUATION = "evaluation", "the metrics differ although parameters and samples are the same"
    UNDISTRIBUTED = (
        "loader without mw.distribute",
        "every rank reads the whole loader, so mw.sum repeats its samples",
    )
    MISSING_SUM = "evaluation without mw.sum", "a loop's counts cover only each rank's own samples"

    def __init__(self, title: str, meaning: str) -> None:
        self.title, self.meaning = title, meaning
        self.address = f"check.md#{re.sub('[^a-z]+', '-', title)}"


@dataclass(frozen=True)
class Cause:
    """The likely cause of a difference, with one or more sentences of evidence for it."""

    kind: CauseKind
    evidence: str

    @property
    def name(self) -> str:
        return self.kind.title
