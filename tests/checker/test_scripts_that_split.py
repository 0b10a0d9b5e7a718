"""`meshwise check` of programs that cut their batches with `mw.split`: those of docs/loops.md, and what they may do.

Of checker/engine_watcher.py and checker/model_tracer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checker.script_sides import as_it_was, proof  # noqa: F401

LOOPS = Path(__file__).parents[2] / "examples" / "loops"
QUICK = ("regression", "reinforce")
WHOLE = {
    "graph": ("        model.train()\n", "        model.train()\n        x = mw.split(x, whole=True)\n"),
    "reinforce": (" = play(policy)", " = mw.split(*play(policy), whole=True)"),
}
"""What begins a step in programs whose batches have no rows."""


@pytest.mark.parametrize(
    "name", [pytest.param(p.stem, marks=[pytest.mark.slow] * (p.stem not in QUICK)) for p in sorted(LOOPS.glob("*.py"))]
)
def test_each_program_of_the_docs_is_equal_and_nothing_false_is_said(name: str, pool: Any) -> None:
    found = proof((LOOPS / f"{name}.py").read_text().replace(*WHOLE.get(name, ("", ""))), pool)
    assert found.equal, (found.comparison.first, found.cause)
    assert len(found.batches) == 3, "an update by hand is a step too"
    own = "from a generator of the program's own: it is not keyed, so each rank draws from its own."
    assert not [text for text in found.comparison.left_out if "draws" in text and not text.endswith(own)]


def test_a_batch_that_is_read_ahead_leaves_the_draws_of_the_one_before(pool: Any) -> None:
    text = (LOOPS / "get_batch.py").read_text()
    assert text.count("dropout=0.0") == 1
    found = proof(text.replace("dropout=0.0", "dropout=0.2"), pool)
    assert found.equal, (found.comparison.first, found.cause)


def test_noise_drawn_after_the_split_is_that_of_the_whole_batch(pool: Any) -> None:
    text = (LOOPS / "vae.py").read_text()
    right = "x, noise = mw.split(data[rows], torch.randn(len(rows), 3))"
    assert text.count(right) == 1
    found = proof(text.replace(right, "x = mw.split(data[rows]); noise = torch.randn(len(x), 3)"), pool)
    assert found.equal, (found.comparison.first, found.cause)
