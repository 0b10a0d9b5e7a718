"""Find the section of docs/ that explains an error.

The table addresses.toml maps each section to the modules and functions whose errors it explains. Tested in
tests/docs/test_addresses.py.
"""

from __future__ import annotations

import contextlib
import tomllib
import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def more(address: str) -> str:
    """Return the line that is printed below an error to name a section of docs/. Empty if `address` is empty.

    address: the section, as `page.md#section`.
    """
    return address and f"more      docs/{address}"


def addresses() -> dict[str, str]:
    """Return a dict from source files, and single functions, to the section of docs/ that explains their errors."""
    table = tomllib.loads((PACKAGE / "spec/addresses.toml").read_text(encoding="utf-8"))
    return {place: address for address, places in table.items() for place in places}


def address_of(error: BaseException) -> str:
    """Return the section of docs/ that explains an error that meshwise raised.

    It is empty if there is no such section, or if the user's program raised the error. For an error that ends a run, it
    is the section that the failed worker reported.
    """
    if hasattr(error, "failure"):
        return getattr(error.failure, "more", "")
    with contextlib.suppress(OSError):  # addresses.toml cannot be read if too many files are open
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            place = frame.filename.removeprefix(f"{PACKAGE}/").removesuffix(".py")
            if place != "spec/errors":  # errors.py raises on behalf of its caller
                return (known := addresses()).get(f"{place}/{frame.name}") or known.get(place, "")
    return ""
