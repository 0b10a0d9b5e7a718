"""`meshwise bench`: measure the machine, check every path, judge it; save that, and compare two of them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from meshwise.api.bench import WHAT
from meshwise.api.bench import bench as measure
from meshwise.api.bench_hosts import bench_hosts
from meshwise.api.machines import read_machine
from meshwise.machine.bench import Bench
from meshwise.machine.compare import compare as compare_machines
from meshwise.machine.file.write import machine_to_toml, toml_writer
from meshwise.machine.measure.alone import Compute
from meshwise.machine.measure.result import PathResult
from meshwise.machine.views.bench_dict import bench_dict
from meshwise.machine.views.bench_text import bench_text, done_text
from meshwise.machine.views.changes_text import changes_text
from meshwise.records.atomic import write_text
from meshwise.spec.errors import UsageError
from meshwise.workers.nodes import NodeOptions

app = typer.Typer()


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
    hosts: Annotated[
        bool, typer.Option("--hosts", help="measure between hosts: started on each, by torchrun or with --nnodes")
    ] = False,
    nnodes: Annotated[int, typer.Option(help="hosts that are measured")] = 1,
    node_rank: Annotated[int, typer.Option(help="which of them this is, from 0")] = 0,
    rdzv: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="where host 0 is reached by the others")] = None,
) -> None:
    """Measure devices, copies and collectives, check every byte, and say whether that is good for these parts.

    Exit code 1: a path corrupts data. 3: a device or path is far below what its part does. 0: neither.
    """
    if compare is not None:
        _compare(*compare, as_json)
        return
    target = None if save is None else _writable(Path(save))
    asked = [name for name, wanted in zip(WHAT, (compute, links, collectives), strict=True) if wanted]
    if seconds is not None and not 0.1 <= seconds <= 86400:
        raise UsageError(f"--seconds {seconds:g}: give from 0.1 to 86400, for instance --seconds 60.")
    hosts = hosts or nnodes > 1 or bool(rdzv)
    if hosts and (compute or devices):
        raise UsageError("--hosts measures one device of each host. Leave --compute and --devices out.")
    if nnodes > 1:
        print(f"waiting     for {nnodes} hosts at {rdzv}", file=sys.stderr)
    with _stoppable(), _progress() as (tell, done):
        if hosts:
            machines = NodeOptions(nnodes=nnodes, node_rank=node_rank, rdzv=rdzv)
            between = asked or WHAT[1:]
            told = bench_hosts(what=between, sizes=sizes, seconds=seconds, machines=machines, tell=tell, done=done)
        else:
            told = measure(devices, what=asked or WHAT, sizes=sizes, seconds=seconds, tell=tell, done=done)
    raise typer.Exit(0 if told is None else _show(told, target, as_json))


def _show(found: Bench, target: Path | None, as_json: bool) -> int:
    """Print and save it; returns the exit code."""
    if as_json:
        print(json.dumps(bench_dict(found), indent=2))
    else:
        Console().print(bench_text(found), soft_wrap=True)
    if target is not None:
        write_text(target, machine_to_toml(found.machine))
        print(f"written     {target}", file=sys.stderr if as_json else sys.stdout)
    return found.exit_code


def _compare(old: str, new: str, as_json: bool) -> None:
    before, after = read_machine(Path(old)), read_machine(Path(new))
    if as_json:
        print(json.dumps([asdict(change) for change in compare_machines(before, after)], indent=2))
        return
    Console().print(changes_text(compare_machines(before, after)), soft_wrap=True)


def _writable(path: Path) -> Path:
    """`path`, if a machine file may be written there; nothing else is overwritten. Raises UsageError."""
    toml_writer()  # before anything is measured
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--save {path}: no file can be there. Name one in a folder that exists, such as here.toml.")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--save {path}: nothing may be written in {path.parent}. Name a file elsewhere.")
    if path.exists():
        try:
            read_machine(path)
        except UsageError:
            raise UsageError(f"--save {path}: is there, and is no machine file. Name another file.") from None
    return path


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and a closed terminal end a bench as Ctrl-C does: what was measured is kept."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[PathResult | Compute], None]]]:
    """What is measured now, on stderr: a line that changes on a terminal, a line for what is done elsewhere."""
    console = Console(stderr=True)

    def line(done: PathResult | Compute) -> None:
        console.print(f"measured    {done_text(done)}", soft_wrap=True, highlight=False, markup=False)

    if not console.is_terminal:
        yield lambda text: None, line
        return
    with console.status("measuring") as status:
        yield lambda text: status.update(f"measuring {text}"), line
