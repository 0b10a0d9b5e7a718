"""Import a package's files on first use, to start quickly.

A command's help then does not wait for torch, and the program's random numbers do not move: some libraries draw when
they are imported.

A package says in its `__init__.py` `__getattr__ = files_of(__name__)`, and names its files to type checkers in
`__init__.pyi`; then `from meshwise import api` and `api.run.start_job(...)`.
Tested in tests/cli/test_start_up.py.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def files_of(package: str) -> Callable[[str], ModuleType]:
    """Return a `__getattr__` for the package, which imports the package's file of the requested name on first use."""

    def file(name: str) -> ModuleType:
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        drawn, collects = random.getstate(), gc.isenabled()
        gc.disable()  # what is imported stays: looking for garbage in it takes a tenth of the time
        try:
            return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        finally:
            random.setstate(drawn)
            if collects:
                gc.enable()

    return file
