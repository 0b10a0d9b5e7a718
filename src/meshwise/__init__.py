"""Train, check and compute on many devices as on one, in PyTorch.

The public names are listed once, in `__init__.pyi`, for type checkers and editors. Each is imported from its module
when it is first used, so that a command which needs no torch does not wait for it.
"""

import ast as _ast
import random as _random
import warnings as _warnings
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "0.1.0"

_RENAMED: dict[str, str] = {}
"""Maps old public names to their new names. An old name still works for one release, with a warning."""

_STUB = _ast.parse(_Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {alias.name: node.module for node in _STUB.body if isinstance(node, _ast.ImportFrom) for alias in node.names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> _Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        _warnings.warn(f"meshwise.{name} has a new name. Use meshwise.{new}.", DeprecationWarning, stacklevel=2)
        return __getattr__(new)
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'meshwise' has no attribute {name!r}")
    drawn = _random.getstate()  # importing rich draws random numbers, which must not change a program's seeded state
    value = globals()[name] = getattr(_import_module(module), name)
    _random.setstate(drawn)
    return value


def __dir__() -> list[str]:
    return __all__
