"""Describe what a check of a script has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One result of checking a script."""

    kind: str
    wrong: bool
    places: tuple[str, ...]
    evidence: str
    instead: str = ""
