"""Show the devices of this machine or a described one: `meshwise devices`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from meshwise import hardware
from meshwise.hardware import views

app = typer.Typer(add_completion=False)


@app.command()
def devices(
    machine: Annotated[
        str | None, typer.Argument(help="8xH100, 2x8xA100-80GB@200Gb or a machine file; default: this machine")
    ] = None,
    no_torch: Annotated[
        bool, typer.Option("--no-torch", help="do not import torch; use only NVML and system files")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print every fact as JSON")] = False,
) -> None:
    """Show devices, memory, links, versions, known limits, and what is unknown.

    \b
    meshwise devices                         this machine
    meshwise devices 2x8xA100-80GB@200Gb     two hosts of eight GPUs each
    meshwise devices here.toml --json        a file that bench --save wrote
    """
    found = hardware.machines.find_machine(machine, torch=not no_torch)
    if as_json:
        print(json.dumps(views.devices.devices_dict(found), indent=2))
    else:
        Console().print(views.devices.devices_text(found), soft_wrap=True)
