"""Why the metrics of an evaluation differ, when parameters and buffers do not."""

from __future__ import annotations

from meshwise.equivalence.compare import Difference
from meshwise.equivalence.evidence import Cause, Evidence, near, pair, repeated_text

UNSUMMED = "without mw.sum"
"""How a loop of a script is called whose figures are of one rank alone."""


def evaluated(first: Difference, seen: Evidence) -> Cause:
    """The cause of a difference of kind `evaluation`."""
    if first.name.endswith(UNSUMMED):
        what = first.name.removesuffix(f", {UNSUMMED}")
        return Cause(
            "evaluation without mw.sum",
            f"{what} had no mw.backward and no mw.sum, so each rank has the figure of its own share.",
        )
    if first.facts.get("repeated") or first.facts.get("missing"):
        return Cause("padded or repeated sample", repeated_text(first.name, first))
    if "ranks apart" in first.facts:
        return Cause("evaluation", f"ranks have each their own {first.name}, which should be that of all samples.")
    text = f"parameters and buffers are equal; {first.name} is {pair(first)}"
    counted = _counted_again(seen)
    if counted:
        return Cause("padded or repeated sample", f"{text}, as if {counted}.")
    if seen.plan.evaluation_draws and not seen.one.evaluation_draws:
        return Cause("dropout masks", f"{text}; the plan draws random numbers in the evaluation, one device none.")
    return Cause("evaluation", f"{text}.")


def _counted_again(seen: Evidence) -> str:
    """The sample that stands in for ranks without any and would be counted there, or that would not be counted at all,
    to give the plan's metrics: all of those that differ."""
    wrong = [d.name for d in seen.comparison.differences if d.kind == "evaluation" and d.fault]
    alone = seen.one.alone
    if not wrong or any(name not in alone or name not in seen.one.sums for name in wrong):
        return ""
    for index in alone[wrong[0]]:
        stand_ins = seen.plan.stand_ins.get(index, 0)
        for times in (stand_ins, -1) if stand_ins else (-1,):
            if all(index in alone[n] and _gives(seen, n, index, times) for n in wrong):
                return f"sample {index} were not counted" if times < 0 else f"sample {index} counted {times + 1} times"
    return ""


def _gives(seen: Evidence, name: str, index: int, times: int) -> bool:
    total, weights = seen.one.sums[name]
    mean, weight = seen.one.alone[name][index]
    weight *= times
    return weights + weight > 0 and near((total + mean * weight) / (weights + weight), seen.plan.evaluation[name], 1e-9)
