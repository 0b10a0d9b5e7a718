"""Hold a watched program's trace, and whether it can be compared."""

from __future__ import annotations

from dataclasses import dataclass

from meshwise.equivalence.trace import Trace
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan


@dataclass
class ProgramTrace:
    """The recorded run of a program in a check.

    plan: the plan of the program's models. None if no model was given to `mw.distribute`.
    trace: all that was recorded in the steps of the run. None if the program read no batches.
    backwards: how many backward passes ran.
    """

    plan: Plan | None = None
    trace: Trace | None = None
    backwards: int = 0


def trace_to_compare(found: ProgramTrace, script: str) -> Trace:
    """Return the trace in `found`. Raise UsageError if the script made no steps, so that a check has nothing to
    compare. The message says what to write in the script."""
    if found.plan is None:
        raise UsageError(
            f"{script}: mw.distribute was given no model, so there is nothing to check. Write "
            "model, optimizer, loader = mw.distribute(model, optimizer, loader) before the loop."
        )
    if found.trace is None:
        raise UsageError(
            f"{script}: no loop ran over a distributed loader. Give the DataLoader to mw.distribute too, and loop over "
            "what it returns. Without a loader, call x = mw.split(x) in each step, or mw.split(x, whole=True) for what "
            "has no rows."
        )
    if found.backwards == 0:
        text = (
            f"{script}: not judged. loss.backward() was never called (with view='rank': mw.backward(loss)). After "
            "torch.autograd.grad, let an optimizer make the step."
        )
        raise UsageError("\n".join([text, *found.trace.hints]))  # what the source shows is known all the same
    if not found.trace.steps:
        raise UsageError(
            f"{script}: no optimizer of the model made a step after {found.backwards} backwards. Give the "
            "optimizer the parameters of the distributed model, and call optimizer.step()."
        )
    return found.trace
