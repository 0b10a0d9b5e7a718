"""Rehearse what a run needs on a cluster before it is queued.

Tested in tests/cli/test_submit.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwise.api.machines import find_machine
from meshwise.api.plan import Plans, plan_options
from meshwise.api.plan_options import PlanOptions
from meshwise.job.options import AUTO, RunOptions
from meshwise.jobs.registry import find_job
from meshwise.rehearsal.estimate import FITS, UNKNOWN, Estimate
from meshwise.schedulers.site import Site
from meshwise.spec.devices import parse_devices
from meshwise.spec.errors import MeshwiseError, UsageError
from meshwise.spec.plan_settings import settings_text
from meshwise.spec.units import bytes_text, plural, seconds_text
from meshwise.workers.deadline import least_limit

SECONDS = 45.0
"""How many seconds an estimate may take. With `--nodes 2-8`, there are two estimates: for 2 nodes and for 8 nodes."""


def verdict(
    options: RunOptions,
    arguments: Sequence[str],
    site: Site,
    nodes: tuple[int, int],
    limit: float | None,
    say: Callable[[str], object],
) -> str:
    """Estimate a run on the smallest and on the largest number of nodes, without running it, and show both estimates.

    Returns why the run should not be submitted, or an empty string if nothing speaks against it. Raises UsageError for
    a program that can never run.

    nodes: the smallest and the largest number of nodes.
    limit: the time limit of an attempt in seconds. None if there is none.
    say: called with lines for the user.
    """
    _check_program(options)
    if not site.machine:
        say(f'not rehearsed: {site.file or "site.toml"} names no machine. For one node, add to it: machine = "8xH100"')
        return ""
    refused = ""
    for count in dict.fromkeys(nodes):
        lines, why = _of_size(options, arguments, site, count, limit, say)
        for line in lines:
            say(line)
        refused = refused or why
    return refused


def _check_program(run: RunOptions) -> None:
    """Raise UsageError if the run can never start: because `--devices` is invalid, the job does not exist, or the
    script is not valid Python."""
    if run.devices is not None:
        parse_devices(run.devices)
    if str(run.job).endswith(".py"):
        file = Path(str(run.job))
        try:
            compile(file.read_text(encoding="utf-8"), str(file), "exec")
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{file} is not a valid Python program ({error}).") from None
    else:
        find_job(str(run.job), seed=run.seed, args=run.args)


def _of_size(
    options: RunOptions,
    arguments: Sequence[str],
    site: Site,
    nodes: int,
    limit: float | None,
    say: Callable[[str], object],
) -> tuple[list[str], str]:
    machine = find_machine(machine_words(site, nodes))
    where = f"{plural(nodes, 'node')} × {len(machine.devices) // nodes} {site.machine.partition('x')[2] or 'devices'}"
    asked = PlanOptions(
        str(options.job),
        machine=machine,
        batch_size=options.batch_size,
        args=options.args,
        seed=options.seed,
        seconds=SECONDS,
        arguments=tuple(arguments),
        devices=str(len(machine.devices)) if options.plan == AUTO else None,
        fits=None if options.plan == AUTO else options.plan_on(len(machine.devices)),
    )
    say(f"{where}: rehearsing, {SECONDS:.0f} s at the most …")
    try:
        plans = plan_options(asked)
    except UsageError as error:
        raise type(error)(f"{where}: {error} Fix this before you submit: --anyway skips only warnings.") from None
    except MeshwiseError as error:
        return [f"{where}: cannot run. {error}"], f"on {where} the job cannot run: {error}"
    return _told(plans, plans.found.estimates[0], where, options, limit)


def machine_words(site: Site, nodes: int) -> str:
    """Return the value of `--machine` for `nodes` nodes of a site, such as `2x8xH100@400Gb` for two nodes. Raises
    UsageError if there are several nodes, but the site describes its machine by a file."""
    if nodes == 1:
        return site.machine
    if site.machine.endswith(".toml"):
        raise UsageError(
            f"{site.file}: machine = '{site.machine}' is a machine file for a single node, but the run has {nodes} "
            'nodes. Describe the machine in words: machine = "8xH100" and network = "400Gb".'
        )
    return f"{nodes}x{site.machine}" + (f"@{site.network}" if site.network else "")


def _told(plans: Plans, first: Estimate, where: str, options: RunOptions, limit: float | None) -> tuple[list[str], str]:
    memory = first.memory
    low, high = bytes_text(memory.total.low), bytes_text(memory.total.high)
    room = "" if memory.capacity is None else f" of {bytes_text(memory.capacity)}"
    step = f"the time of a step is not known: {first.unknown}"
    if first.seconds is not None:
        step = f"a step takes {seconds_text(first.seconds.value)} ({_range(first)})"
    lines = [f"{where}: {settings_text(first.plan)} {memory.verdict}, {low} to {high}{room}; {step}."]
    if (whole := _to_the_end(plans, first, options, limit)) is not None:
        lines.append(whole)
    if first.seconds is not None and (why := too_short(first.seconds.value, limit)):
        return lines, f"on {where} {why}"
    if memory.verdict in (FITS, UNKNOWN):
        return lines, ""
    return lines, f"on {where} {settings_text(first.plan)} {memory.verdict}: {low} to {high}{room}"


def too_short(step: float, limit: float | None) -> str:
    """Return why a time limit is too short, or an empty string if it is long enough. There must be time for one step
    and for saving checkpoints after it.

    step: the seconds of a step.
    limit: the time limit in seconds. None means no limit.
    """
    if limit is None or (needs := least_limit(step, limit)) <= limit:
        return ""
    return (
        f"a step of {seconds_text(step)} with three saves after it needs {seconds_text(needs)}, but --time is "
        f"{seconds_text(limit)}, so no attempt could finish and save a step"
    )


def _to_the_end(plans: Plans, first: Estimate, options: RunOptions, limit: float | None) -> str | None:
    """Return a sentence that says how long the whole training takes: in steps, in hours, and in device hours. If there
    is a time limit, the sentence also says how many attempts of this length the training needs. Return None if the
    number of steps or the time of a step is unknown.

    limit: the time limit of an attempt in seconds. None if there is none.
    """
    if plans.steps is None or first.seconds is None:
        return None
    steps = plans.steps if options.epochs is None else _with_epochs(plans, options)
    hours = steps * first.seconds.value * first.plan.devices / 3600
    wall = [steps * seconds for seconds in (first.seconds.low, first.seconds.value, first.seconds.high)]
    told = f"to the end: {plural(steps, 'step')}, {seconds_text(wall[1])} ({seconds_text(wall[0])} to "
    told += f"{seconds_text(wall[2])}), {hours:.2g} device hours without evaluations and saving"
    if limit is not None:
        least, most = (max(1, math.ceil(seconds / limit)) for seconds in (wall[0], wall[2]))
        told += (
            f"; {least if least == most else f'{least} to {most}'} attempt{'s' * (most > 1)} of {seconds_text(limit)}"
        )
    return f"{told}."


def _with_epochs(plans: Plans, options: RunOptions) -> int:
    job = find_job(str(options.job), seed=options.seed, args=options.args)
    return round((plans.steps or 0) / job.epochs * (options.epochs or job.epochs))


def _range(estimate: Estimate) -> str:
    assert estimate.seconds is not None
    return f"{seconds_text(estimate.seconds.low)} to {seconds_text(estimate.seconds.high)}"
