"""A fault is put on the module in whose own code it lies, not on the next child, whose input differs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.kinds import short
from tests.checker.script_sides import as_it_was, proof  # noqa: F401

BLOCK = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.kinds = nn.Linear(16, 16), nn.Embedding(32, 16)

    def forward(self, x, *, scale=1):
        return self.inner(FLOATS) + self.kinds(NUMBERS)


model.insert(1, nn.Sequential(Block()))
# parts
"""
WRONG = {
    "a block's own code": ("FLOATS", "x * (scale + mw.rank())", "1.0", "module"),
    "a statistic in it": ("FLOATS", "x - x.mean(0)", "1.0", "module"),
    "whole numbers": ("NUMBERS", "x.argmax(1) + mw.rank()", "1.0", "module"),
    "the loop": ("model(xb)", "model(xb * (1 + mw.rank()))", "", "batch contents"),
    "samples mixed in the loop": ("model(xb)", "model(xb + xb[torch.randperm(len(xb))])", "", "coupled samples"),
    "a child's hook": ("# parts\n", "model[1][0].inner.register_forward_hook(lambda *g: g[2] * (1 + mw.rank()))\n",
                       "1.0.inner", "module"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*WRONG, "right", "another input that nothing depends on"])
def test_the_code_that_makes_a_wrong_input_is_named(name: str, pool: Any) -> None:
    unused = "model(xb)", "model(xb, mw.rank() * xb)"
    right, instead, module, cause = WRONG.get(name, (*(unused if name.startswith("another") else ("", "")), "", ""))
    text = short(("# parts\n", BLOCK)).replace(right, instead) if right else short(("# parts\n", BLOCK))
    if name.startswith("another"):
        text = text.replace("# parts\n", "model.register_forward_pre_hook(lambda module, given: given[:1])\n")
    found = proof(text.replace("FLOATS", "x").replace("NUMBERS", "x.argmax(1)"), pool)
    assert found.equal == (not cause)
    if found.comparison.first is not None and found.cause is not None:
        kind = "model inputs" if "xb" in instead else "module outputs"
        assert (found.comparison.first.kind, found.module, found.cause.name) == (kind, module, cause)
