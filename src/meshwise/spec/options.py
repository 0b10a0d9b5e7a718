"""Declare options as dataclass fields: name, type, default, help.

Each option is written once:

    @dataclass(frozen=True, kw_only=True)
    class BenchOptions:
        seconds: Annotated[float | None, Option("measure for this long in all")] = None

`@takes(BenchOptions)` gives a Python function these options as typed arguments, which editors complete.
`command_line.from_dataclass` makes a command line of the options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

from meshwise.spec.errors import UsageError

P = ParamSpec("P")
Options = TypeVar("Options")
R = TypeVar("R")


@dataclass(frozen=True)
class Option:
    """The description of one field of an options dataclass. It is part of the field's `Annotated` type.

    The command line and the help are made from it.
    name: the name of the option. None uses the field's name with dashes.
    argument: whether the option is a positional argument (`JOB`).
    scripts: whether the option also applies to a user's own script. False if it applies to jobs only.
    recorded: whether run.json keeps the value for a run that is resumed.
    """

    help: str
    name: str | None = None
    metavar: str | None = None
    argument: bool = False
    scripts: bool = True
    recorded: bool = True


OfJobs = functools.partial(Option, scripts=False)
"""Describe an option that applies to jobs only, not to a user's own script."""
OfThisStart = functools.partial(Option, recorded=False)
"""Describe an option that applies to one start of a run. A later resume uses its own value, or the default."""
OfThePlan = functools.partial(Option, name="--set", metavar="FIELD=VALUE")
"""Describe the option `--set`, which sets a field of the plan."""


def options_of(kind: type) -> Iterator[tuple[str, Any, Option]]:
    """Yield (name, type, `Option`) for each field of a dataclass that has an `Option`. Inherited fields come last."""
    hints = get_type_hints(kind, include_extras=True)
    for name in (name for each in kind.__mro__ for name in vars(each).get("__annotations__", ())):
        for option in get_args(hints[name]):
            if isinstance(option, Option):
                yield name, get_args(hints[name])[0], option


def given_options(options: Any) -> Iterator[tuple[str, Any, Option]]:
    """Yield (name, value, `Option`) for each field of an options dataclass whose value is not the default."""
    defaults = {field.name: field.default for field in fields(options)}
    for name, _, option in options_of(type(options)):
        value = getattr(options, name)
        if value != defaults[name]:
            yield name, value, option


def check_script(script: str, options: Any) -> None:
    """Raise UsageError if the script does not exist, or if an option is given that applies to jobs only."""
    if not Path(script).is_file():
        raise UsageError(f"{script}: no such file. Name a Python file, or a job such as mnist-mlp or train.py:job.")
    for name, value, option in given_options(options):
        if not option.scripts:
            given = "" if value is True else f" {value[0] if isinstance(value, tuple) else value}"
            words = option_name(name, option) + given
            raise UsageError(
                f"{words}: this option works only for jobs, but {script} is a script. Write the script's own options "
                "after its name, or make a Job of the script."
            )


def option_name(field: str, option: Option) -> str:
    """Return the name of a field's option on the command line: `--batch-size`."""
    return option.name or f"--{field.replace('_', '-')}"


def takes(options: Callable[P, Options]) -> Callable[[Callable[[Options], R]], Callable[P, R]]:
    """Return a decorator for a function whose only argument is an options dataclass.

    The decorated function takes the fields of the dataclass as separate arguments. Type checkers and `help` show them.
    """

    def decorate(function: Callable[[Options], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def with_fields(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(options(*args, **kwargs))

        assert isinstance(options, type)
        signature, hints = inspect.signature(options), get_type_hints(options)
        order = [name for name, *_ in options_of(options)]
        parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
        parameters.sort(key=lambda p: order.index(p.name) if p.name in order else len(order))
        returned = get_type_hints(function).get("return", signature.empty)
        described = [f"{name}: {option.help}." for name, _, option in options_of(options)]
        with_fields.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
        with_fields.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": returned}
        with_fields.__doc__ = "\n".join([inspect.getdoc(function) or "", "", *described])
        del with_fields.__wrapped__
        return with_fields

    return decorate
