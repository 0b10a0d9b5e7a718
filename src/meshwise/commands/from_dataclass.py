"""A command line from a dataclass: each field that has an `Option` is an option of the command.

    @app.command()
    @from_dataclass
    def bench(options: BenchOptions, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:

The command has the options of BenchOptions, in their order, and `--json`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from meshwise.spec.options import Option, option_name, options_of


def from_dataclass(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as typer reads it: a parameter that is a dataclass stands for options with the names of its fields."""
    hints = get_type_hints(function, include_extras=True)
    given = inspect.signature(function).parameters.values()
    kinds: dict[str, type] = {p.name: hints[p.name] for p in given if is_dataclass(hints[p.name])}

    def command(**values: Any) -> None:
        made = {name: kind(**_taken(kind, values)) for name, kind in kinds.items()}
        function(**made, **values)

    own = {p.name: p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in given}
    parameters = [each for name, p in own.items() for each in (_parameters(kinds[name]) if name in kinds else [p])]
    command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _taken(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, out of what was typed. What may be repeated is a tuple there."""
    taken = {name: values.pop(name) for name, _, _ in options_of(kind)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in taken.items()}


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    by_name: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}
    for name, annotation, option in options_of(kind):
        default = _default(by_name[name])
        typed: Any = Annotated[_typed(annotation), _declared(name, option, default)]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=typed)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    if field.default is MISSING:
        return inspect.Parameter.empty
    return list(field.default) if isinstance(field.default, tuple) else field.default


def _declared(name: str, option: Option, default: Any) -> Any:
    if option.argument:
        return typer.Argument(help=option.help, metavar=option.metavar)
    words = option_name(name, option)
    if default is True and option.name is None:
        words += f"/--no-{name.replace('_', '-')}"
    return typer.Option(words, help=option.help, metavar=option.metavar)


def _typed(annotation: Any) -> Any:
    """What a command line gives of a type: text, where a value may be text, and a list of what may be repeated."""
    kinds = get_args(annotation)
    if str in kinds and get_origin(annotation) is not tuple:
        return (str | None) if type(None) in kinds else str
    if get_origin(annotation) is tuple and kinds[1:] == (...,):
        return types.GenericAlias(list, kinds[:1])
    return annotation
