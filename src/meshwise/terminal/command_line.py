"""Make a command line from a dataclass whose fields have `Option`.

    @app.command()
    @from_dataclass
    def bench(options: BenchOptions, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:

The command has the options of BenchOptions, in their order, and `--json`.

A `ScriptCommand` takes a job or a script. All words after a script's name are passed to the script: `meshwise run
--devices 4xcpu train.py --out x` passes `--out x` to train.py, as `python` and torchrun do. The options of a job may
come before and after the job's name.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from meshwise.spec.options import Option, option_name, options_of
from meshwise.terminal.completion import OF_OPTIONS
from meshwise.terminal.script_options import check_options_behind

BEHIND = "meshwise.behind"
"""The key in the `meta` of a click context for the words after the script's name on the command line."""
PANELS = {
    "Plan": ("plan", "settings", "exact_random"),
    "Saving and failures": ("save_every", "keep", "time_limit", "restarts", "hang_limit", "on_failure", "fault"),
    "Records": ("log", "out", "folder"),
    "Where": ("devices", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint"),
}
"""The fields of options dataclasses that the help lists in a panel of their own."""


def from_dataclass(function: Callable[..., None], without: Sequence[str] = ()) -> Callable[..., None]:
    """Convert `function` to a command for typer: each parameter that is a dataclass is replaced by one option per
    field.

    without: the names of fields for which the command has no option. They keep their defaults.
    """
    hints = get_type_hints(function, include_extras=True)
    given = inspect.signature(function).parameters.values()
    kinds: dict[str, Any] = {p.name: hints[p.name] for p in given if is_dataclass(hints[p.name])}

    def command(**values: Any) -> None:
        for name, kind in kinds.items():
            of_kind = {field: values.pop(field) for field, *_ in options_of(kind) if field in values}
            values[name] = kind(**{field: tuple(v) if isinstance(v, list) else v for field, v in of_kind.items()})
        function(**values)

    parameters: list[inspect.Parameter] = []
    for p in given:
        own = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name])]
        parameters += _parameters(kinds[p.name], without) if p.name in kinds else own
    command.__name__, command.__doc__, command.__module__ = function.__name__, function.__doc__, function.__module__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameters(kind: Any, without: Sequence[str]) -> Iterator[inspect.Parameter]:
    defaults = {field.name: field.default for field in fields(kind)}
    for name, annotation, option in options_of(kind):
        if name in without:
            continue
        default = inspect.Parameter.empty if defaults[name] is MISSING else defaults[name]
        default = list(default) if isinstance(default, tuple) else default
        typed: Any = Annotated[_typed(annotation), _declared(name, option, default)]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=typed)


def _declared(name: str, option: Option, default: Any) -> Any:
    facts: dict[str, Any] = {"help": option.help, "metavar": option.metavar, "autocompletion": OF_OPTIONS.get(name)}
    if option.argument:
        return typer.Argument(**facts)
    words = option_name(name, option)
    if default is True and option.name is None:
        words += f"/--no-{name.replace('_', '-')}"
    panels = [title for title, names in PANELS.items() if name in names]
    panels += [] if option.scripts else ["Of jobs alone"]
    return typer.Option(words, rich_help_panel=next(iter(panels), None), **facts)


def _typed(annotation: Any) -> Any:
    """Return the type of an option for typer. A tuple becomes a list, because the option can be repeated. A union that
    contains str becomes str."""
    kinds = get_args(annotation)
    for kind in (annotation, *kinds):
        if get_origin(kind) is tuple and get_args(kind)[1:] == (...,):
            return types.GenericAlias(list, get_args(kind)[:1])
    if str in kinds:
        return (str | None) if type(None) in kinds else str
    return annotation


def is_script(word: object) -> bool:
    """Return whether a job argument is the path of a user's script, which is a string that ends in `.py`."""
    return isinstance(word, str) and word.endswith(".py")


class ScriptCommand(TyperCommand):
    """A click command that stops reading its options at the name of a script, such as `train.py`.

    The words after the name belong to the script, and are kept in `context.args`. The command must have an argument
    `job`. The dataclass of its options must be passed to the command as `context_settings={"obj": RunOptions}`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line like click, except those after a script's name."""
        ctx.allow_interspersed_args = False
        values, behind, _ = self.make_parser(ctx).parse_args(list(args))
        job = values.get("job")
        own = behind if is_script(job) else []
        ctx.meta[BEHIND] = list(own)
        ctx.allow_interspersed_args = not is_script(job)
        super().parse_args(ctx, args[: len(args) - len(own)])
        if own[:1] == ["--"]:
            own = own[1:]
        else:
            of_ours = options_of(ctx.obj) if ctx.obj else ()
            of_jobs = {option_name(name, option) for name, _, option in of_ours if not option.scripts}
            check_options_behind(str(job), own, {name for each in self.params for name in each.opts} - of_jobs)
        if is_script(job):
            ctx.args = own
        return own
