"""Read a job's arguments from the command line: `--arg lr=3e-4`.

Each text is converted to the type in the signature of the job's function. This file does not import torch.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

from meshwise.spec.errors import UsageError, nearest

Plain: TypeAlias = int | float | bool | str | PathLike[str] | None
"""The types that a job's argument may have. Values of all these types can be written as text."""
WORDS = {"true": True, "yes": True, "false": False, "no": False}


def argument_texts(given: Mapping[str, Plain] | Sequence[str]) -> tuple[str, ...]:
    """Return each argument as the text `name=value`, such as `lr=0.0003`, as it is stored in run.json.

    Raises UsageError if a text is not of the form NAME=VALUE, if a name is given twice, or if a value is not a number,
    text, path or None.
    """
    if isinstance(given, Mapping):
        for name, value in given.items():
            if not isinstance(value, int | float | str | PathLike | None):
                raise UsageError(f"args: {name} must be a number, text, path or None, not {type(value).__name__}.")
        given = [f"{name}={value}" for name, value in given.items()]
    names = [text.partition("=")[0] for text in given]
    for name, text in zip(names, given, strict=True):
        if "=" not in text or not name.isidentifier():
            raise UsageError(f"--arg {text} is not of the form NAME=VALUE. Use for instance --arg lr=3e-4.")
        if names.count(name) > 1:
            raise UsageError(f"--arg {name}= is given {names.count(name)} times. Give it once.")
    return tuple(given)


def read_arguments(function: Callable[..., Any], texts: Sequence[str], word: str) -> dict[str, Any]:
    """Convert `name=value` texts to the types in the function's annotations, or else the types of its defaults.

    Raises UsageError for a name that the function does not take, or for a text that cannot be converted.
    word: how the user names the function, for error messages.
    """
    parameters = inspect.signature(function).parameters
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # an annotation may need a name that only type checkers import
        hints = {}
    known = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known and not any_name:
            has = f"{word} takes {', '.join(known)}." if known else f"{word} takes none."
            raise UsageError(f"--arg {text}: {word} has no parameter '{name}'.{nearest(name, known)} {has}")
        default = parameters[name].default if name in known else inspect.Parameter.empty
        found[name] = _read(value, _kinds(hints.get(name, Any), default), f"--arg {text}: '{name}' of {word}")
    return found


def _kinds(hint: Any, default: Any) -> list[Any]:
    """Return the types that a parameter takes. For a Literal, return its values."""
    if hint is Any and default in (None, inspect.Parameter.empty):
        return [*READ]
    if hint is Any:
        return [int, float] if type(default) is int else [type(default)]
    arms = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType, Literal) else (hint,)
    return [*dict.fromkeys([*arms, types.NoneType] if default is None else arms)]


def _read(text: str, kinds: Sequence[Any], what: str) -> Any:
    readers = [read for kind, read in READ.items() if kind in kinds]
    readers += [{str(word): word}.__getitem__ for word in kinds if isinstance(word, str | int)]
    for read in readers:
        with contextlib.suppress(ValueError, KeyError):
            return read(text)
    names = " or ".join("None" if k is types.NoneType else getattr(k, "__name__", str(k)) for k in kinds)
    others = "" if readers else " --arg can pass only an int, float, bool, str, path or None."
    raise UsageError(f"{what} must be {names}.{others}")


def _none(text: str) -> None:
    if text.lower() != "none":
        raise ValueError


READ: Mapping[Any, Callable[[str], Any]] = {
    types.NoneType: _none,
    bool: lambda text: WORDS[text.lower()],
    int: int,
    float: float,
    str: str,
    Path: Path,
}
"""The function that converts a text to each type. If several types are possible, they are tried in this order."""
