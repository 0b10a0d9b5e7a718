"""Define the command line: commands, one-sentence errors, exit codes.

A command's file is imported when the command is typed: torch alone takes a second.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from meshwise.spec.addresses import address_of, more
from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed, nearest
from meshwise.spec.exit_codes import FAILED, MEANINGS, NOT_JUDGED, USAGE
from meshwise.spec.words import printable
from meshwise.terminal import last_words
from meshwise.workers import fast_exit

ROOMS = (
    *(("hardware", "devices bench"), ("launcher", "doctor"), ("planner", "plan"), ("launcher", "run submit predict")),
    *(("checker", "check"), ("reports", "report"), ("launcher", "runs logs stop"), ("training", "checkpoints weights")),
)
"""Pairs of a package and its commands, in order of use. A package may be absent."""
HERE = Path(__file__).parent
FILES = [HERE / house / "commands" / f"{name}.py" for house, names in ROOMS for name in names.split()]
COMMANDS = {file.stem: f"{__package__}.{file.parts[-3]}.commands.{file.stem}" for file in FILES if file.exists()}
EXIT_CODES = {
    **MEANINGS,
    str(FAILED): f"{MEANINGS[str(FAILED)]}. bench: a path corrupts data. check: the plan differs. "
    "doctor: something would stop or slow a run. plan: no plan fits for certain",
    str(USAGE): f"{MEANINGS[str(USAGE)]}. check: no verdict, also where the program fails",
    str(NOT_JUDGED): "check: nothing differs in float64, but not all is judged: rounding on one side, a number that "
    "the script shows, losses that are not finite, local steps",
}


LONG_WORD = re.compile(r"(\S{100})\S{200,}(\S{20})")  # shown without its middle

NARROW = 66  # in a terminal with fewer columns, the boxes of a command's help would cut off option names


class Commands(TyperGroup):
    """The subcommands of `meshwise`, in the order in which they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # `Any`, since newer typer has its own copy of click
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:  # the shell asks for completions
                return None
            raise UsageError(
                f"meshwise {cmd_name}: no such command.{nearest(cmd_name, COMMANDS)} Use one of {', '.join(COMMANDS)}."
            )
        command = typer.main.get_command(import_module(COMMANDS[cmd_name]).app)
        if shutil.get_terminal_size().columns < NARROW:
            command.rich_markup_mode = None  # type: ignore[attr-defined]
        return command

    def invoke(self, ctx: Any) -> Any:
        """Invoke a command as click does. If the user presses Ctrl-C, or a program that the command runs calls
        `sys.exit`, raise an error from meshwise instead. In a process that a launcher such as torchrun started,
        `sys.exit` ends the process as usual."""
        try:
            return super().invoke(ctx)
        except Exception:
            raise
        except BaseException as error:
            workers = f"{__package__}.workers"  # imported when needed, like commands
            stopped = isinstance(error, KeyboardInterrupt)
            if not stopped and import_module(f"{workers}.environment").started_by_launcher():
                raise
            raise import_module(f"{workers}.failure").of_command(error) from None


app = typer.Typer(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Many devices work as one for PyTorch: train on all of them with the numbers of one, and see where time went.",
    epilog="Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="print the version and exit")] = False) -> None:
    if version:
        print(f"meshwise {import_module(str(__package__)).__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command `meshwise`."""
    atexit.register(gc.freeze)  # otherwise Python's last garbage collection visits all imported objects
    _open_standard_files()
    last_words.watch(sys.stdout, sys.stderr)
    with fast_exit.on_exit(_end):
        try:
            code = app(sys.argv[1:], standalone_mode=False, prog_name="meshwise")
            _flush()
        except typer.Exit as exit:
            code = exit.exit_code
        except Exception as error:
            told = _refusal_of(error)
            if told is None:
                raise
            _print_error(told)
            code = told.exit_code
            with contextlib.suppress(OSError):
                _flush()
    if (meeting := sys.modules.get("meshwise.workers.meeting")) is not None and meeting.hangs():
        os._exit(code)
    sys.exit(code)


def _end(call: str) -> None:
    """Show an error, and end this process at once.

    This is called if a program that the command runs, such as the user's script, ends the process by itself.

    call: what the program called, such as `train.py:3: os._exit(0)`.
    """
    error = UsageError(fast_exit.OF_COMMAND.format(call=call))
    _print_error(error)
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # show the cursor, which is hidden while progress is drawn
    os._exit(error.exit_code)


def _open_standard_files() -> None:
    """Open stdin, stdout or stderr on the null device if the caller has closed it. Otherwise, the next opened file
    would get its file descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open returns the lowest free number, `number`
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _refusal_of(error: Exception) -> MeshwiseError | None:
    """Return the error to show for an exception that ended a command. Return None if the exception is a bug of
    meshwise."""
    if isinstance(error, MeshwiseError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return MeshwiseError("more files are open than this shell allows. Raise the limit with ulimit -n 4096.")
    if isinstance(error, OSError) and error.filename is None:
        return MeshwiseError(f"the output cannot be written: {error.strerror}.")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UsageError(f"{error.filename}: this file name is too long. Use a shorter name.")
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # raised by click
        text = error.format_message()
        refused = UsageError(f"{text.rstrip('.')}. See meshwise --help." if text else "")
        refused.exit_code = error.exit_code
        return refused
    return None


def _print_error(error: MeshwiseError) -> None:
    if text := LONG_WORD.sub(r"\1…\2", str(error)):
        name = "" if isinstance(error, WorkerFailed) else f"{type(error).__name__}: "
        with contextlib.suppress(OSError):  # the terminal may be gone
            last_words.say_last(f"{name}{printable(text)}", more(address_of(error)))


def _flush() -> None:
    """Flush stdout. Raises OSError if stdout cannot be written, unless its reader is gone or a job has closed it."""
    with contextlib.suppress(AttributeError, ValueError):
        try:
            sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno != errno.EPIPE:
                raise
