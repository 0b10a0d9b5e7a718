"""Diagnose mistakes in what ranks exchange by hand.

By hand means with torch.distributed collectives that the program itself calls.
"""

from __future__ import annotations

from meshwise.checker.causes import Cause
from meshwise.checker.causes import CauseKind as K
from meshwise.checker.evidence import Evidence, is_inside, owner_of
from meshwise.checker.exchanges import places_of
from meshwise.checker.rank_weights import weights_in

WRITE = "Write the all_reduce into the backward of a torch.autograd.Function"


def over_another_group(evidence: Evidence) -> str:
    """Return a sentence if the first wrong module sums over the wrong process group."""
    said = evidence.of_another_group(evidence.exchanges(evidence.first.name, sums=True))
    return f"{evidence.where(evidence.first.name)} is the first whose outputs differ; {said}" if said else ""


def without_a_backward(evidence: Evidence) -> Cause | None:
    """Explain a wrong gradient, which no weights of the ranks give, by a collective in a forward."""
    solved = weights_in(*evidence.steps, [evidence.first.name])
    if solved is None or solved.one:
        return None
    owner = owner_of(evidence.first.name)
    module = next((name for name in (owner, *_called_next(evidence)) if evidence.exchanges(name)), None)
    if module is None:
        return None
    text = f"{evidence.how_many()}, from {evidence.first.name} on; no weights of the ranks' own gradients give it."
    text = f"{text} {evidence.where(module)} exchanges by hand in"
    back = {each.function for each in evidence.actual.exchanges_backward}
    found = evidence.exchanges(module)
    lost = [each for each in found if not each.function or each.function not in back]
    if lost:
        text = f"{text} {places_of(lost)}, but its backward has no collective: no gradient comes back"
        return Cause(K.MISSING_REDUCTION, f"{text}. {WRITE}.")
    return Cause(K.BACKWARD, f"{text} {places_of(evidence.exchanges(module))}: look at the backward of that.")


def _called_next(evidence: Evidence) -> list[str]:
    """Return the modules that are called after that of the first wrong gradient."""
    owner, names = owner_of(evidence.first.name), evidence.calls()
    last = max((at for at, name in enumerate(names) if name == owner), default=len(names))
    called = [name for name in names[last + 1 :] if not is_inside(owner, name)]
    right = {owner_of(d.name) for d in evidence.of_kind("gradients") if not d.fault}
    return called[: next((at + 1 for at, name in enumerate(called) if name in right), None)]
