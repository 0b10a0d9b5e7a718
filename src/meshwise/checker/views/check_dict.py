"""Convert a proof to JSON, with every figure.

An infinite difference, where one side lacks a value, is the text `inf`.
"""

from __future__ import annotations

from typing import Any

from meshwise.checker.difference import LIMIT
from meshwise.checker.proof import PlainProof, Proof
from meshwise.spec.json_values import json_value
from meshwise.spec.plan import changed


def check_dict(proof: Proof | PlainProof) -> dict[str, Any]:
    """Convert a proof to plain values, ready for JSON."""
    if isinstance(proof, PlainProof):
        plain: dict[str, Any] = json_value(proof, str)
        return {"verdict": proof.verdict.value, "equal": proof.equal, **plain}
    c, cause = proof.comparison, proof.cause
    return {
        "verdict": proof.verdict.value,
        "equal": proof.equal,
        "job": proof.job,
        "plan": json_value(changed(proof.plan), str),
        "devices": proof.devices,
        "batches": list(proof.batches),
        "limit": LIMIT,
        "first": None if c.first is None else {**json_value(c.first, str), "module": proof.module},
        "cause": None if cause is None else {"name": cause.name, "means": cause.kind.meaning, "why": cause.evidence},
        "compared": json_value(c.kinds, str),
        "differences": [json_value(d, str) for d in c.differences if d.relative > 0],
        "left_out": list(c.left_out),
        "rounding": json_value(proof.rounding, str),
        "notes": list(proof.notes),
        "not_judged": list(proof.not_judged),
        "warnings": list(proof.warnings),
    }
