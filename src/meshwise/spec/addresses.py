"""Find the part of docs/ that says more of what was refused.

The table addresses.toml names it by the module or function that raised the error. Tested in
tests/docs/test_addresses.py.
"""

from __future__ import annotations

import contextlib
import tomllib
import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def more(address: str) -> str:
    """Return the line below an error that names a part of docs/; empty if `address` is. address: `page.md#part`."""
    return address and f"more      docs/{address}"


def addresses() -> dict[str, str]:
    """Return the part of docs/ for each `room/file`, and for `room/file/function` if a function has another one."""
    table = tomllib.loads((PACKAGE / "spec/addresses.toml").read_text(encoding="utf-8"))
    return {place: address for address, places in table.items() for place in places}


def address_of(error: BaseException) -> str:
    """Return the part of docs/ that says more about an error that meshwise raised; empty if there is none, or if the
    user's program raised it. For an error that ends a run, return what the failed worker reported."""
    if hasattr(error, "failure"):
        return getattr(error.failure, "more", "")
    with contextlib.suppress(OSError):  # no file can be opened any more
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            place = frame.filename.removeprefix(f"{PACKAGE}/").removesuffix(".py")
            if place != "spec/errors":  # it refuses in the name of who called it
                return (known := addresses()).get(f"{place}/{frame.name}") or known.get(place, "")
    return ""
