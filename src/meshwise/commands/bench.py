"""`meshwise bench`: measure the machine, check every path, judge it; save that, and compare two of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwise.api.bench import WHAT
from meshwise.api.bench import bench as measure
from meshwise.api.machines import read_machine
from meshwise.machine.bench import bench_dict
from meshwise.machine.compare import compare as compare_machines
from meshwise.machine.compare import compare_text
from meshwise.machine.machine_file import machine_to_toml
from meshwise.machine.views.bench_text import bench_text
from meshwise.records.atomic import write_text
from meshwise.spec.errors import UsageError

app = typer.Typer()

STOPPED = 130


@app.command()
def bench(
    compute: Annotated[bool, typer.Option("--compute", help="measure each device: memory, matrix products")] = False,
    links: Annotated[bool, typer.Option("--links", help="measure copies between host and devices")] = False,
    collectives: Annotated[bool, typer.Option("--collectives", help="measure all-reduce and the others")] = False,
    devices: Annotated[
        str | None,
        typer.Option(help="4xcpu, 2xcuda, cuda:0,1; default: all accelerators, else a worker a core"),
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="1K:1G in steps of four, 1K:1G:2 doubles, 64M is one")] = None,
    seconds: Annotated[float | None, typer.Option(help="of measuring in all")] = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="write what was measured as a machine file")] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="OLD NEW", help="two machine files: what has changed"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print every figure as JSON")] = False,
) -> None:
    """Measure devices, copies and collectives, check every byte, and say whether that is good for these parts.

    Exit code 1: a path corrupts data. 3: a device or path is far below what its part does. 0: neither.
    """
    if compare is not None:
        _compare(*compare)
        return
    target = None if save is None else _writable(Path(save))
    asked = [name for name, wanted in zip(WHAT, (compute, links, collectives), strict=True) if wanted]
    if seconds is not None and not 0.1 <= seconds <= 86400:
        raise UsageError(f"--seconds {seconds:g}: give from 0.1 to 86400, for instance --seconds 60.")
    with _progress() as tell:
        found = measure(devices, what=asked or WHAT, sizes=sizes, seconds=seconds, tell=tell)
    if as_json:
        print(json.dumps(bench_dict(found), indent=2))
    else:
        Console().print(bench_text(found), soft_wrap=True)
    if target is not None:
        write_text(target, machine_to_toml(found.machine))
        print(f"written     {target}", file=sys.stderr if as_json else sys.stdout)
    raise typer.Exit(found.exit_code or (STOPPED if found.stopped else 0))


def _compare(old: str, new: str) -> None:
    before, after = read_machine(Path(old)), read_machine(Path(new))
    Console().print(compare_text(compare_machines(before, after)), soft_wrap=True)


def _writable(path: Path) -> Path:
    """`path`, if a machine file may be written there; nothing else is overwritten. Raises UsageError."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--save {path}: no file can be there. Name one in a folder that exists, such as here.toml.")
    if path.exists():
        try:
            read_machine(path)
        except UsageError:
            raise UsageError(f"--save {path}: is there, and is no machine file. Name another file.") from None
    return path


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is measured now: one line that changes on a terminal, a line each elsewhere, always on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(f"measuring   {text}", soft_wrap=True, highlight=False, markup=False)
        return
    with console.status("measuring") as status:
        yield lambda text: status.update(f"measuring {text}")
