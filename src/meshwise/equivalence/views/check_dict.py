"""A proof as JSON: every figure. What is infinitely far apart, because one side lacks it, is the text `inf`.

Tested in tests/cli/test_check.py.
"""

from __future__ import annotations

from typing import Any

from meshwise.equivalence.compare import Difference
from meshwise.equivalence.proof import Proof
from meshwise.equivalence.tolerance import LIMIT
from meshwise.spec.json_values import json_value
from meshwise.spec.plan import changed


def check_dict(proof: Proof) -> dict[str, Any]:
    """The proof as plain values."""
    c, cause = proof.comparison, proof.cause
    return {
        "equal": proof.equal,
        "job": proof.job,
        "plan": json_value(changed(proof.plan), str),
        "devices": proof.devices,
        "batches": list(proof.batches),
        "limit": LIMIT,
        "first": None if c.first is None else {**_difference(c.first), "module": proof.module},
        "cause": None if cause is None else {"name": cause.name, "means": cause.kind.meaning, "why": cause.evidence},
        "compared": [
            {
                "kind": kind.kind,
                "count": kind.count,
                "faults": kind.faults,
                "largest": None if kind.largest is None else _difference(kind.largest),
            }
            for kind in c.kinds
        ],
        "differences": [_difference(d) for d in c.differences if d.relative > 0],
        "left_out": list(c.left_out),
        "rounding": [
            {"kind": r.kind, "one_device": r.one_device, "plan": json_value(r.plan, str)} for r in proof.rounding
        ],
        "notes": list(proof.notes),
    }


def _difference(d: Difference) -> dict[str, Any]:
    return {
        "kind": d.kind,
        "step": d.step,
        "name": d.name,
        "relative": json_value(d.relative, str),
        "absolute": json_value(d.absolute, str),
        "facts": json_value(d.facts, str),
    }
