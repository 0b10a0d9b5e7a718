"""A machine as plain data, for JSON: every field by its name, in bytes, seconds and FLOP/s; null is unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from meshwise.machine.discovery.host_facts import limits_that_hurt
from meshwise.spec.machine import Machine


def machine_dict(machine: Machine) -> dict[str, Any]:
    """All that is known of a machine, and `limits_that_hurt` in words."""
    return {**plain(machine), "limits_that_hurt": limits_that_hurt(machine)}


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as dicts and lists; null for what is not finite: JSON has no infinity."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
