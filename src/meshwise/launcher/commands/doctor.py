"""Look for what would stop or slow a run: `meshwise doctor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from meshwise import launcher
from meshwise.hardware.discovery.limits import Finding
from meshwise.hardware.views.devices import devices_dict, devices_text
from meshwise.launcher.doctor import Health
from meshwise.launcher.node_seat import NodeOptions, Seat, seat_of
from meshwise.spec.json_values import json_value
from meshwise.spec.units import plural
from meshwise.terminal.command_line import from_dataclass
from meshwise.terminal.screen import LABEL, Drawn, Screen, labelled
from meshwise.workers.place import place_in

app = typer.Typer(add_completion=False)
WARN, USE = f"{'!':>{LABEL - 2}}  ", f"{'use':>{LABEL - 2}}  "


@app.command()
@from_dataclass
def doctor(
    options: NodeOptions,
    program: Annotated[str, typer.Argument(help="a script or job, whose files are compared: train.py")] = "",
    out: Annotated[Path, typer.Option(help="where run folders are made")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Look for what would stop or slow a run, in 20 s, and name the line that mends it.

    Paste what it prints into an issue.
    Exit code 1: something would stop or slow a run. 0: nothing was found.

    \b
    meshwise doctor                                               this machine
    srun --ntasks-per-node=1 meshwise doctor --nodes train.py     all nodes of an allocation
    meshwise doctor --nnodes 2 --node-rank 0 --master-addr n0     by hand, on each
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch is not imported yet
    seat = seat_of(options, place_in(os.environ))
    health = launcher.doctor.examine(out)
    if seat is None:
        raise typer.Exit(_show(health, health.facts, health.findings, as_json))
    code = _compare(seat, health, program, as_json)
    sys.stdout.flush()
    os._exit(code)  # a thread may hang in the store


def _compare(seat: Seat, health: Health, program: str, as_json: bool) -> int:
    """Compare the nodes, show what node 0 found, and return the exit code."""
    met = launcher.node_checks.compare(seat, health.report(program), health.gloo, health.folder)
    if met.bad is None:
        where = f"{seat.host}:{seat.port}"
        why = f"no answer while waiting for {met.stage}" + (f" ({met.error})" if met.error else "")
        mend = "the same --nodes on node 0, and open TCP ports between the nodes"
        lost = Finding("nodes", where, why, mend)
        facts = {"nodes": f"this is node {seat.node} of {seat.nodes}, {health.machine.hosts[0].name}"}
        return _show(health if seat.node == 0 else None, facts, [*health.findings, lost], as_json)
    if seat.node == 0:
        return _show(health, {**health.facts, **met.facts}, met.findings, as_json)
    if not seat.launcher:
        told = f"node {seat.node} has told node 0 what it is like. See the output of node 0."
        print(told, file=sys.stderr, flush=True)
    return int(met.bad)


def _show(health: Health | None, facts: Mapping[str, str], findings: Sequence[Finding], as_json: bool) -> int:
    """Show what was found, and return the exit code."""
    code = int(bool(findings))
    if as_json:
        told: dict[str, Any] = {"facts": facts, "findings": findings, "exit_code": code}
        machine = {} if health is None else {"machine": devices_dict(health.machine)}
        print(json.dumps(json_value(told) | machine, indent=2))
        return code
    console = Console()
    if health is not None:
        console.print(devices_text(health.machine, limits=False), soft_wrap=True)
        print()

    def draw(screen: Screen) -> list[Text]:
        lines = _lines(facts, findings)
        return screen.wrap(*lines, indent=LABEL) if console.is_terminal else [*lines]

    console.print(Drawn(draw), soft_wrap=True)
    return code


def _lines(facts: Mapping[str, str], findings: Sequence[Finding]) -> Iterator[Text]:
    names = dict.fromkeys([*facts, *(each.what for each in findings)])
    for name in names:
        own = [each for each in findings if each.what == name]
        yield labelled(name, facts.get(name, ""), "yellow" if own else "dim")
        for each in own:
            yield Text(WARN, "yellow").append(f"{each.figure}: {each.why}", "default")
            yield Text(USE, "dim").append(each.mend, "default")
    found = [name for name in names if any(each.what == name for each in findings)]
    count = f"{plural(len(findings), 'problem')}: {', '.join(found)}"
    yield Text()
    yield labelled("verdict", count if found else "nothing found that would stop or slow a run")
