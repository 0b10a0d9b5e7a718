"""A command that takes a job or a script: what follows a script's name is the script's own.

`meshwise run --devices 4xcpu train.py --out x` gives `--out x` to train.py, as `python` and torchrun do; the options of
a job may stand on both sides of its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from typer.core import TyperCommand

from meshwise.spec.options import Option, option_name, options_of
from meshwise.spec.words import some


def is_script(word: object) -> bool:
    """Whether the word of a job names a user's own script."""
    return isinstance(word, str) and word.endswith(".py")


class ScriptCommand(TyperCommand):
    """Reads options up to the name of a script, and no further; `context.args` has the script's own arguments.

    It has an argument `job`; `context_settings={"obj": RunOptions}` gives it the dataclass of its options.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does; `ctx` is its Context."""
        ctx.allow_interspersed_args = False
        values, behind, _ = self.make_parser(ctx).parse_args(list(args))
        job = values.get("job")
        own = behind if is_script(job) else []
        ctx.allow_interspersed_args = not is_script(job)
        super().parse_args(ctx, args[: len(args) - len(own)])
        if own[:1] == ["--"]:
            own = own[1:]
        else:
            self._note_options_in(own, str(job), options_of(ctx.obj) if ctx.obj else ())
        ctx.args = own
        return own

    def _note_options_in(self, own: Sequence[str], script: str, options: Iterable[tuple[str, Any, Option]]) -> None:
        of_jobs = {option_name(name, option) for name, _, option in options if not option.scripts}
        known = {name for parameter in self.params for name in parameter.opts} - of_jobs
        given = [word for word in own if word.startswith("--") and word.partition("=")[0] in known]
        if given:
            print(
                f"Note: {script} gets {some(given)}, which follows its name. Options of meshwise stand before the "
                f"script's name; write `{script} -- {given[0]} ...` to leave this note out.",
                file=sys.stderr,
            )
