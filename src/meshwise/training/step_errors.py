"""What is said of a step whose gradients are each rank's own. Tested in tests/training/test_step_mistakes.py."""

from __future__ import annotations

NOT_OURS = (
    "optimizer.step() found gradients that mw.backward did not make, so each rank has its own. "
    "Write mw.backward(loss) instead of loss.backward()."
)
STEPPED_TWICE = (
    "optimizer.step() was called twice after one mw.backward. Its gradients were used already, or come from "
    "loss.backward() and are each rank's own. Call mw.backward(loss) before each step."
)
WHOLE_STATE = "zero1: an optimizer that was not given to mw.distribute keeps its whole state on every rank."
