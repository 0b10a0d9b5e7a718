"""Measure the machine: `meshwise bench`.

The command checks every path, and can save the result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshwise import hardware
from meshwise.hardware import views
from meshwise.hardware.machine_file import machine_to_toml, toml_writer
from meshwise.records.files import write_text
from meshwise.spec.devices import IN_WORDS
from meshwise.spec.errors import UsageError
from meshwise.spec.options import Option
from meshwise.terminal.command_line import from_dataclass

app = typer.Typer(add_completion=False)
WHAT = ("compute", "links", "collectives")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `meshwise bench`."""

    compute: Annotated[bool, Option("measure each device: memory, matrix products")] = False
    links: Annotated[bool, Option("measure copies between host and devices")] = False
    collectives: Annotated[bool, Option("measure all-reduce and other collectives")] = False
    devices: Annotated[str | None, Option(f"{IN_WORDS}; default: all accelerators, else one worker per core")] = None
    sizes: Annotated[str | None, Option("1K:1G in steps of four, 1K:1G:2 doubles, 64M is one")] = None
    seconds: Annotated[float | None, Option("time budget for all measurements")] = None
    save: Annotated[str | None, Option("write the measurements as a machine file", metavar="FILE")] = None
    as_json: Annotated[bool, Option("print every figure as JSON", name="--json")] = False
    hosts: Annotated[bool, Option("measure between hosts: started on each, by torchrun, srun or mpirun")] = False


@app.command()
@from_dataclass
def bench(options: BenchOptions) -> None:
    """Measure devices, copies and collectives, and check every byte.

    Exit code 1: a path corrupts data. 0: none does.

    \b
    meshwise bench                               every device, path and collective
    meshwise bench --links --sizes 1K:1G         only copies, in these sizes
    meshwise bench --save here.toml              as a machine file
    """
    target = None if options.save is None else _writable(Path(options.save))
    what = [name for name in WHAT if getattr(options, name)]
    if options.seconds is not None and not 0.1 <= options.seconds <= 86400:
        raise UsageError(f"--seconds must be from 0.1 to 86400, but it is {options.seconds:g}.")
    if options.hosts and (options.compute or options.devices is not None):
        raise UsageError("--hosts measures one device of each host. Remove --compute and --devices.")
    limits: Any = {"sizes": options.sizes, "seconds": options.seconds}
    with _stoppable(), _progress_shown() as progress:
        if options.hosts:
            found = hardware.bench.bench_hosts(what=what or WHAT[1:], progress=progress, **limits)
        else:
            found = hardware.bench.bench(options.devices, what=what or WHAT, progress=progress, **limits)
    raise typer.Exit(0 if found is None else _show(found, target, options.as_json))


def _show(found: Any, target: Path | None, as_json: bool) -> int:
    """Print the result of a bench, save it if `target` is given, and return its exit code."""
    if as_json:
        print(json.dumps(views.bench.bench_dict(found), indent=2))
    else:
        Console().print(views.bench.bench_text(found), soft_wrap=True)
    if target is not None:
        write_text(target, machine_to_toml(found.machine))
        print(f"written     {target}", file=sys.stderr if as_json else sys.stdout)
    code: int = found.exit_code
    return code


def _writable(path: Path) -> Path:
    """Return `path` if a machine file can be written there. Raises UsageError if it cannot, or if another kind of file
    exists there."""
    toml_writer()  # fail early if tomli_w is missing
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--save {path} must be a file in an existing folder, for example here.toml.")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--save {path}: the folder {path.parent} is not writable. Choose a file in another folder.")
    if path.exists():
        try:
            hardware.machines.read_machine(path)
        except UsageError:
            raise UsageError(f"--save {path}: this file exists, but is not a machine file. Use another.") from None
    return path


@contextmanager
def _progress_shown() -> Iterator[Any]:
    """Show the progress of a bench on stderr, with a line for each finished measurement. A terminal also shows what is
    being measured at the moment."""
    console = Console(stderr=True)

    def line(done: Any) -> None:
        console.print(f"measured    {views.bench.done_text(done)}", soft_wrap=True, highlight=False, markup=False)

    if not console.is_terminal:
        yield hardware.bench.Progress(done=line)
        return
    with console.status("measuring") as status:
        yield hardware.bench.Progress(lambda text: status.update(f"measuring {text}"), line)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Within the context, let SIGTERM and a closed terminal end a bench like Ctrl-C, so that results so far are kept.

    Further signals are ignored, since they would interrupt the saving.
    """

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
