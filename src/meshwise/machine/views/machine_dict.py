"""Convert a machine to plain data, for JSON.

Every field has its name and is in bytes, seconds or FLOP/s; null is unknown.

Tested in tests/machine/test_devices_text.py.
"""

from __future__ import annotations

from typing import Any

from meshwise.machine.discovery.host_facts import limits_that_hurt
from meshwise.spec.json_values import json_value
from meshwise.spec.machine import Machine


def machine_dict(machine: Machine) -> dict[str, Any]:
    """Convert a machine to plain data. The key `limits_that_hurt` has sentences on limits of the hosts that will stop
    or slow training."""
    return {**json_value(machine), "limits_that_hurt": limits_that_hurt(machine)}
