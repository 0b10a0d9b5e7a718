"""The command line: few verbs, errors as one sentence, exit codes that mean something.

0    done
1    a worker failed, the loss is not a number any more, a path does not deliver the bytes that it was given, or a
     plan does not compute what one device computes (`meshwise check`)
2    what was asked cannot be: the sentence says what to write instead
3    a device or a path is far below what its part does (`meshwise bench`)
130  stopped by Ctrl-C (143: by SIGTERM); the state is saved

Each verb is a file of `commands`, read when it is typed: torch alone takes a second.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed, nearest

VERBS = ("devices", "bench", "run", "check", "report")


class Verbs(TyperGroup):
    """The verbs, in the order in which they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # of click, which new versions of typer carry inside
        if cmd_name not in VERBS:
            raise UsageError(
                f"meshwise {cmd_name}: no such verb.{nearest(cmd_name, VERBS)} Known are {', '.join(VERBS)}."
            )
        return typer.main.get_command(import_module(f"{__package__}.commands.{cmd_name}").app)


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Many devices work as one for PyTorch: train on all of them with the numbers of one, and see where time went.",
)


@app.callback()
def _verbs() -> None:
    """Typer makes a group of what has a callback."""


def main() -> None:
    """The command `meshwise`."""
    try:
        code = app(sys.argv[1:], standalone_mode=False)
    except MeshwiseError as error:
        _say(error)
        code = error.exit_code
    except typer.Exit as exit:
        code = exit.exit_code
    except OSError as error:
        if error.filename is not None:
            raise
        _say(MeshwiseError(f"the output cannot be written: {error.strerror}."))
        code = 1
    except Exception as error:
        if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
            raise
        _say(UsageError(f"{error.format_message()} See meshwise --help."))
        code = error.exit_code
    _flush()
    sys.exit(code)


def _say(error: MeshwiseError) -> None:
    text = str(error)
    if text:
        name = "" if isinstance(error, WorkerFailed) else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"{name}{text}", file=sys.stderr, flush=True)


def _flush() -> None:
    """Flush what is printed, even when nobody reads it any more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
