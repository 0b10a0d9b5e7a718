"""Look for what would stop or slow a run: `meshwise doctor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from meshwise import launcher
from meshwise.hardware.discovery.limits import Finding
from meshwise.hardware.views.devices import devices_dict, devices_text
from meshwise.launcher.doctor import Health
from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.spec.json_values import json_value
from meshwise.spec.options import Option
from meshwise.spec.units import plural
from meshwise.terminal.command_line import from_dataclass
from meshwise.terminal.screen import LABEL, Drawn, labelled
from meshwise.workers.node_options import NodeOptions
from meshwise.workers.place import place_in
from meshwise.workers.places.place import Place
from meshwise.workers.ports import port_of

app = typer.Typer(add_completion=False)
HOW = (
    "Start it on each node: srun --ntasks-per-node=1 meshwise doctor --nodes. Or by hand: meshwise doctor --nnodes 2 "
    "--node-rank 0 --master-addr HOST --wait 120, and --node-rank 1 on the other."
)
HEALTHY = "nothing found that would stop or slow a run"
WARN, USE = f"{'!':>{LABEL - 2}}  ", f"{'use':>{LABEL - 2}}  "


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(NodeOptions):
    """The options of `meshwise doctor` about several nodes."""

    nodes: Annotated[bool, Option("compare all nodes: started on each, by srun, torchrun or mpirun")] = False
    wait: Annotated[float, Option("seconds for all nodes to come")] = 10.0

    def seat(self, place: Place) -> Place | None:
        """Return this node with the address at which nodes meet, or None if they are not to be compared. Raises
        UsageError if it is unknown."""
        if self.nnodes > 1 or not self.nodes:
            return self.place()
        hosts = [place.address[0]] if place.address else place.hosts
        if not place.one_a_node or not hosts:
            here = f"{plural(place.size, 'task')} on {plural(place.nodes, 'node')}"
            raise UsageError(f"--nodes needs one task on each of several nodes, but found {here}. {HOW}")
        key = place.key or str(place.address)
        return replace(place, address=(hosts[0], port_of(f"doctor {key}")), key=key)  # not the port of the run


@app.command()
@from_dataclass
def doctor(
    options: DoctorOptions,
    program: Annotated[str, typer.Argument(help="a script or job, whose files are compared: train.py")] = "",
    out: Annotated[Path, typer.Option(help="where run folders are made")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Look for what would stop or slow a run, in 20 s, and name the line that mends it.

    Paste what it prints into an issue.
    Exit code 1: something would stop or slow a run. 0: nothing was found.

    \b
    meshwise doctor                                              this machine
    meshwise doctor --json                                       for programs
    srun --ntasks-per-node=1 meshwise doctor --nodes train.py    all nodes of an allocation
    meshwise doctor --nnodes 2 --node-rank 0 --master-addr n0    by hand, on each
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch is not imported yet
    place = place_in(os.environ)
    seat = options.seat(place)
    health = launcher.doctor.examine(out, place)
    if seat is None:
        raise typer.Exit(_show(health, health.facts, health.findings, as_json))
    try:
        facts, found = launcher.nodes.compare(seat, health, program, options.wait)
    except WorkerFailed as error:
        facts = {}
        found = [*health.findings, Finding("nodes", f"node {seat.node}", str(error), launcher.nodes.OPEN)]
    if seat.node == 0 or not facts:
        _show(health, {**health.facts, **facts}, found, as_json)
    sys.stdout.flush()
    os._exit(int(bool(found)))  # a thread may hang in the store


def _show(health: Health, facts: Mapping[str, str], findings: Sequence[Finding], as_json: bool) -> int:
    """Show what was found, and return the exit code."""
    code = int(bool(findings))
    if as_json:
        told = {"facts": facts, "findings": findings, "exit_code": code, "machine": devices_dict(health.machine)}
        print(json.dumps(json_value(told), indent=2))
        return code
    console = Console()
    console.print(devices_text(health.machine, limits=False), Text(), sep="\n", soft_wrap=True)
    lines = [*_lines(facts, findings)]
    drawn = Drawn(lambda screen: screen.wrap(*lines, indent=LABEL) if console.is_terminal else lines)
    console.print(drawn, soft_wrap=True)  # else a pipe would cut lines at 80 characters
    return code


def _lines(facts: Mapping[str, str], findings: Sequence[Finding]) -> Iterator[Text]:
    names = dict.fromkeys([*facts, *(each.what for each in findings)])
    for name in names:
        own = [each for each in findings if each.what == name]
        fact = facts.get(name, "")
        yield labelled(name, fact, "yellow" if own else "dim")
        for each in own:
            why = each.why if each.figure == fact else f"{each.figure}: {each.why}"
            yield Text.assemble((WARN, "yellow"), why)
            yield Text.assemble((USE, "dim"), each.mend)
    found = [name for name in names if any(each.what == name for each in findings)]
    count = f"{plural(len(findings), 'problem')}: {', '.join(found)}"
    yield Text()
    yield labelled("verdict", count if found else HEALTHY, "yellow" if found else "green")
