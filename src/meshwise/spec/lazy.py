"""Import a package's files on first use, to start quickly.

The help of a command then does not wait for torch. The program's random numbers stay the same, although some libraries
draw random numbers when they are imported.

A package has `__getattr__ = files_of(__name__)` in its `__init__.py`, and names its files to type checkers in
`__init__.pyi`. Its users write `from meshwise import launcher` and `launcher.run.start_job(...)`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from meshwise.spec.garbage import no_collections


def files_of(package: str) -> Callable[[str], ModuleType]:
    """Return a `__getattr__` function for a package, which imports the file of the requested name on first use."""

    def file(name: str) -> ModuleType:
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        drawn = random.getstate()
        try:
            with no_collections():  # collecting the little garbage of an import would take a tenth of its time
                return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        finally:
            random.setstate(drawn)

    return file
