"""`meshwise check` of scripts as others write them: no fault where there is none, no fall, and the right cause.

Of training/data/keyed.py, checker/engine_watcher.py, checker/model_tracer.py and checker/coupled_operators.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.others import EQUAL, MIXTURES, WRONG
from tests.checker.script_sides import as_it_was, proof  # noqa: F401


@pytest.mark.parametrize("name", EQUAL)
def test_a_script_that_is_right_is_equal(name: str, pool: Any) -> None:
    found = proof(EQUAL[name], pool)
    assert found.equal, (found.comparison.first, found.cause)
    counts = {compared.kind: compared.count for compared in found.comparison.kinds}
    assert counts["gradients"] >= 9 and len(found.batches) >= 3
    assert not [text for text in found.comparison.left_out if "draws" in text]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_of_experts_is_equal(name: str, pool: Any) -> None:
    found = proof(MIXTURES[name], pool)
    assert found.equal, (found.comparison.first, found.cause)
    assert not any("experts" in text and "Experts" in text for text in found.comparison.left_out)


@pytest.mark.parametrize("name", WRONG)
def test_the_cause_is_named(name: str, pool: Any) -> None:
    text, cause, says = WRONG[name]
    found = proof(text, pool)
    assert found.cause is not None and found.cause.name == cause, (found.comparison.first, found.cause)
    assert says in found.cause.evidence
