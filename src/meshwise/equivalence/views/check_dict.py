"""A proof as JSON: every figure. What is infinitely far apart, because one side lacks it, is the text `inf`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwise.equivalence.compare import Difference
from meshwise.equivalence.proof import Proof
from meshwise.equivalence.tolerance import LIMIT
from meshwise.spec.plan import changed


def check_dict(proof: Proof) -> dict[str, Any]:
    """The proof as plain values."""
    c, cause = proof.comparison, proof.cause
    return {
        "equal": proof.equal,
        "job": proof.job,
        "plan": _plain(changed(proof.plan)),
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
        "rounding": [{"kind": r.kind, "one_device": r.one_device, "plan": _plain(r.plan)} for r in proof.rounding],
        "notes": list(proof.notes),
    }


def _difference(d: Difference) -> dict[str, Any]:
    return {
        "kind": d.kind,
        "step": d.step,
        "name": d.name,
        "relative": _plain(d.relative),
        "absolute": _plain(d.absolute),
        "facts": _plain(d.facts),
    }


def _plain(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
