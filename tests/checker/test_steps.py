"""What counts as one step: of several optimizers, of a wrapper, in a backward. Passes that cannot judge rounding."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.checker.precision_warnings import OTHER_RUN
from tests.checker.kinds import short
from tests.checker.script_sides import as_it_was, proof  # noqa: F401

ADAM, GIVEN = "torch.optim.AdamW(model.parameters(), lr=0.01)", "several = mw.world_size() > 1\n"
WRAPPER = """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.params = inner, [p for group in inner.param_groups for p in group["params"]]
        self.slow = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for p, slow in zip(self.params, self.slow):
            WRAPPED


model.insert(1, nn.LayerNorm(16))
# parts
"""
ROUNDED = "p.copy_(torch.from_numpy((p.numpy().astype('float32').view('int32') & -65536).view('float32')))"
HOOK = """
own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
def stepped(p):
    p.grad.mul_(FACTOR)
    own[p].step()
    p.grad = None
for p in model.parameters():
    p.register_post_accumulate_grad_hook(stepped)
"""


def two(rate: str) -> str:
    other = f"other = torch.optim.Adam(model[2].parameters(), lr={rate})\nmw.distribute(other, view='rank')\n{GIVEN}"
    steps = "        optimizer.step()\n", "        optimizer.step()\n        other.step()\n"
    return short((ADAM, "torch.optim.SGD(model[0].parameters(), lr=0.1)"), (GIVEN, other), steps)


def wrapped(instead: str) -> str:
    sgd = "Wrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))"
    return short((ADAM, sgd), ("# parts\n", WRAPPER.replace("WRAPPED", instead)))


def in_backward(factor: str) -> str:
    whole = ('view="rank"', 'view="whole"'), ("mw.backward(loss)", "loss.backward()")
    return short(*whole, (GIVEN, GIVEN + HOOK.replace("FACTOR", factor)))


CASES = {
    "two optimizers": (two("0.01"), ""),
    "two optimizers, one by rank": (two("0.01, betas=(0.9 - 0.1 * mw.rank(), 0.99)"), "optimizer step"),
    "a wrapper": (wrapped("pass"), ""),
    "a wrapper that keeps what stood": (wrapped("p.copy_(slow if mw.rank() else p)"), "optimizer step"),
    "a rank in low precision": (wrapped(f"if mw.rank(): {ROUNDED}"), "master weights"),
    "in the backward": (in_backward("1"), ""),
    "in the backward, by ranks": (in_backward("mw.world_size()"), "doubled reduction"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_all_that_took_part_in_it(name: str, pool: Any) -> None:
    text, cause = CASES[name]
    found = proof(text, pool)
    assert found.batches[:3] == (8, 8, 5) and (found.cause.name if found.cause else "") == cause
    assert found.comparison.first is None or found.comparison.first.step == 1


def test_other_start_values_are_not_called_rounding(pool: Any) -> None:
    default = ("torch.manual_seed(0)", "torch.set_default_dtype(torch.float64)")
    in_float64 = short(default, ("dtype=np.float32", "dtype=np.float64"))
    found = proof(f"{in_float64}torch.set_default_dtype(torch.float32)", pool, rounding=True)
    assert found.equal and not found.rounding and OTHER_RUN in found.notes
    right = proof(short(), pool, rounding=True)
    assert right.equal and right.rounding and OTHER_RUN not in right.notes
