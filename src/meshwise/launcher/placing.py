"""Decide whether this process is a rank, and which run it continues.

This module does not import torch.

If the launcher started one task per device, each task is a rank. If it started one task on each machine, with several
devices, meshwise starts the workers there.

For `meshwise run --folder DIR`, `continued` begins or continues the folder's run. So a batch script has the same
command at every start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwise.hardware.find import find_devices
from meshwise.launcher.code_files import refuse_changed_code
from meshwise.launcher.restarts import refuse_without_progress
from meshwise.records import folder as names
from meshwise.records.checkpoints import run_and_checkpoint
from meshwise.records.lock import refuse_held
from meshwise.spec.devices import parse_devices
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.exit_codes import under_scheduler
from meshwise.spec.json_values import json_value
from meshwise.spec.units import plural
from meshwise.spec.world import World
from meshwise.training.job.options import RunOptions
from meshwise.workers.environment import DEVICE_KIND, VISIBLE
from meshwise.workers.place import address_of, place_in
from meshwise.workers.places.place import Place
from meshwise.workers.ports import port_of

ASKED = "asked"
"""The key in run.json under which the options of the run's first start are recorded."""


def placed(options: RunOptions, environment: Mapping[str, str] = os.environ) -> tuple[RunOptions, bool]:
    """Return (options with the machines that srun or another launcher uses, whether this process is a rank)."""
    place = place_in(environment)
    if place.size == 1:
        return options, False
    _refuse_contradiction(options, place)
    # `meshwise submit` sets `folder`.
    if place.one_a_node and (options.nnodes > 1 or options.folder is not None or _devices(options) > 1):
        host, port = options.address or address_of(place)
        if place.launcher == "torchrun":  # its own store uses this port
            port = port_of(place.key)
        options = replace(options, nnodes=place.nodes, node_rank=place.node)
        return replace(options, master_addr=host, master_port=port, rdzv_endpoint=None), False
    take_devices(options.devices, place)
    return options, True


def take_devices(devices: str | None, place: Place) -> None:
    """Use the CPU for this rank if `devices` asks for it. Raises UsageError if it asks for other devices than the first
    ones, one for each process that the launcher started on this machine."""
    request, tasks = parse_devices(devices or "all"), place.tasks_here
    count = len(request.indices) if request.indices else request.count or 1
    if count not in (1, tasks) or request.indices not in (None, tuple(range(tasks))):
        raise UsageError(
            f"--devices {devices}, but {place.launcher or 'the launcher'} started {plural(tasks, 'task')} on this "
            f"machine, {place.size} in all, which use one device each, the first ones. Remove --devices. Start one "
            f"task for each device (srun --ntasks-per-node={count}), and choose devices by {VISIBLE}."
        )
    if request.kind == "cpu":
        os.environ.setdefault(DEVICE_KIND, "cpu")


def check_kind(devices: str | None, world: World) -> None:
    """Raise UsageError if this rank's device is not of the kind that `--devices` names."""
    kind = parse_devices(devices or "all").kind
    if kind not in (None, world.kind):
        raise UsageError(
            f"--devices {devices}: rank {world.rank} runs on {world.device} here. Start the run where torch "
            f"{version('torch')} finds a {kind} device, or remove --devices."
        )


def _devices(options: RunOptions) -> int:
    return len(find_devices(parse_devices(options.devices or "all")))


def _refuse_contradiction(options: RunOptions, place: Place) -> None:
    launcher = place.launcher or "the launcher"
    if options.nnodes not in (1, place.nodes) or options.node_rank not in (0, place.node):
        raise UsageError(
            f"--nnodes {options.nnodes} --node-rank {options.node_rank}, but this is machine {place.node} of "
            f"{place.nodes}, as {launcher} says. Remove --nnodes and --node-rank: {launcher} sets these."
        )


def continued(options: RunOptions) -> RunOptions:
    """Return the options with which to start or continue the run in the folder `options.folder`."""
    assert options.folder is not None
    folder = Path(options.folder)
    if options.resume is not None:
        raise UsageError("--folder and --resume both continue an earlier run. Use only one of these options.")
    facts = run_in(folder, options.job)
    asked = facts.get(ASKED)
    if not facts.get("sessions") or not isinstance(asked, dict):
        return options
    now = options.record()
    same = {name for name, value in now.items() if json_value(value) == asked.get(name)}
    new = RunOptions()
    given = replace(options, **{name: getattr(new, name) for name in same - {"job"}})
    return replace(given.resumed(facts), folder=folder)


def refuse_running(options: RunOptions) -> None:
    """Raise UsageError if the run to continue is still running on this machine."""
    given = options.folder if options.resume is None else options.resume
    several = options.nnodes != 1 or place_in(os.environ).launcher
    if given is not None and not several:
        refuse_held(run_and_checkpoint(Path(given))[0])


def is_done(options: RunOptions, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a scheduler starts a run again that has finished with the same options. It does so if one machine
    was lost after the last step: those that ended with 0 do not come back to meet it."""
    if options.folder is None or not under_scheduler(environment):
        return False
    folder = Path(options.folder)
    facts = names.read_run(folder) if (folder / names.RUN).exists() else {}
    return facts.get("status") == "finished" and facts.get(ASKED) == json_value(options.record())


def run_in(folder: Path, program: object) -> dict[str, Any]:
    """Return the record of a folder's run, or {} if it has none.
    Raises MeshwiseError if the run must not continue."""
    if not (folder / names.RUN).exists():
        return {}
    facts = names.read_run(folder)
    word = str(program or facts.get("job", ""))
    script, there = word.endswith(".py"), str(facts.get("job", ""))
    if (script or there.endswith(".py")) and Path(there).name != Path(word).name:
        raise UsageError(f"--folder {folder} contains a run of '{there}', not of '{word}'. Name another folder.")
    if (folder / names.STOP).exists():
        raise UsageError(
            f"{folder} was stopped by meshwise stop, so it does not restart by itself. Submit it again with meshwise "
            f"submit {folder}, or continue it on this machine: meshwise run --resume {folder}"
        )
    try:
        if not script:  # a script may save its states elsewhere
            refuse_without_progress(folder, facts)
        refuse_changed_code(folder, word)
    except MeshwiseError as error:  # recorded, so that the run shows why it does not continue
        names.change_run(folder, status="failed", error=str(error))
        raise
    return facts
