"""`meshwise devices`: what is here, or what a machine in words or a file has. Tested in tests/cli/test_bench.py."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from meshwise.api.machines import find_machine
from meshwise.machine.views.devices_text import devices_text
from meshwise.machine.views.machine_dict import machine_dict

app = typer.Typer()


@app.command()
def devices(
    machine: Annotated[
        str | None, typer.Argument(help="8xH100, 2x8xA100-80GB@200Gb or a machine file; default: what is here")
    ] = None,
    no_torch: Annotated[
        bool, typer.Option("--no-torch", help="do not wait for torch: NVML and the system's own files")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print every fact as JSON")] = False,
) -> None:
    """Show devices, memory, links, versions, limits that will hurt, and what is unknown."""
    found = find_machine(machine, torch=not no_torch)
    if as_json:
        print(json.dumps(machine_dict(found), indent=2))
    else:
        Console().print(devices_text(found), soft_wrap=True)
