"""Look for what would stop or slow a run: `meshwise doctor`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from meshwise import launcher
from meshwise.hardware.discovery.limits import Finding
from meshwise.hardware.views.devices import devices_dict, devices_text
from meshwise.launcher.doctor import Health
from meshwise.spec.json_values import json_value
from meshwise.spec.units import plural
from meshwise.terminal.screen import LABEL, Drawn, labelled
from meshwise.workers.place import place_in

app = typer.Typer(add_completion=False)
HEALTHY = "nothing found that would stop or slow a run"
WARN, USE = f"{'!':>{LABEL - 2}}  ", f"{'use':>{LABEL - 2}}  "


@app.command()
def doctor(
    out: Annotated[Path, typer.Option(help="where run folders are made")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Look for what would stop or slow a run on this machine, and name the line that mends it.

    Paste what it prints into an issue.
    Exit code 1: something would stop or slow a run. 0: nothing was found.

    \b
    meshwise doctor
    meshwise doctor --out /shared/me/runs     is there room for states?
    meshwise doctor --json                    for programs
    """
    health = launcher.doctor.examine(out, place_in(os.environ))
    raise typer.Exit(_show(health, as_json))


def _show(health: Health, as_json: bool) -> int:
    """Show what was found, and return the exit code."""
    facts, findings = health.facts, health.findings
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
