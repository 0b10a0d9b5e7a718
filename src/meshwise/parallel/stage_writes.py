"""Track parameters that a pipeline stage's forward writes.

The backward of an earlier microbatch may need the values from before the write.

Autograd raises an error in a backward if a parameter that the backward needs was written in place. It does not see
writes to `p.data` (`p.data.lerp_(...)`). So parameters that the first forwards write in this way are marked as written
before each later forward.

Tested in tests/parallel/test_written_parameters.py.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwise.compat.dispatch import rehearsing
from meshwise.compat.reducer import versions
from meshwise.compat.sharding import hashes_of, local_of
from meshwise.spec.errors import PlanError
from meshwise.transfer import stages

LOOKS = 2  # first forwards of a rank's stages in which values are read


class StageWrites:
    """Finds parameters that this rank's forwards write. Call `begin` before each forward, and `end` after it."""

    def __init__(self) -> None:
        self._left, self._past = LOOKS, list[Tensor]()
        self._before: list[tuple[Tensor, int, int]] = []

    def begin(self, model: nn.Module) -> None:
        """Prepare for a forward of `model`. The forward may write to parameters through `p.data`, which autograd does
        not notice.

        If an earlier forward wrote to a parameter in this way, multiply the parameter by 1 here, which autograd does
        notice. A backward that needs the old values then raises an error. In the first `LOOKS` forwards, also record
        hashes of all parameters, which `end` compares.
        """
        for p in self._past:
            p.detach().mul_(1)
        if self._left and not rehearsing():
            absent = stages.absent_parameters(model)
            held = [local_of(p).detach() for p in model.parameters() if p not in absent and local_of(p).numel()]
            self._before = list(zip(held, versions(held), hashes_of(held), strict=True))

    def end(self) -> None:
        """End a forward. In the first `LOOKS` forwards, find the parameters whose hash has changed since `begin`
        although autograd noticed no write. The forward has written to them through `p.data`."""
        if self._left and self._before:
            self._left -= 1
            held = [p for p, _, _ in self._before]
            after = zip(self._before, versions(held), hashes_of(held), strict=True)
            self._past += [p for (p, writes, was), now, found in after if found != was and now == writes]
            self._before = []


def refused(error: RuntimeError, ranks: int) -> PlanError | None:
    """Return a PlanError that explains torch's error about a forward that writes parameters. Return None for any other
    error."""
    text = str(error)
    if "written-to tensor refers to a single memory location" in text:
        what = "the forward writes into a parameter (p.lerp_(...)) whose values only another stage has"
    elif "has been modified by an inplace operation" in text:
        what = "a forward writes values in place (p.lerp_(...)) that the backward of an earlier microbatch still needs"
    else:
        return None
    return PlanError(
        f"pipeline={ranks}: {what}. Write to a parameter only in the block that contains it, and use it without "
        "gradients (as a teacher or a codebook). Or use data or tensor for this model."
    )
