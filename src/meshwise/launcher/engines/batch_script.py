"""Write a job's batch script for `sbatch`, short enough to edit.

The script has comments, and can also be submitted by hand.

What happens at the end of a job was tested on Slurm 22.05 and 24.11:
- the script also receives the signals of a time limit, a preemption or `scancel`, which would end its `wait`;
- `scontrol requeue` restarts a job that was just cancelled. Called on a node that was cut off, it also stops a
  healthy later start on other nodes. So only the newest start that Slurm knows calls it, and only while the job runs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwise.launcher.engines.site import Site
from meshwise.spec.errors import UsageError

_NODES = re.compile(r"[1-9]\d{0,5}(-[1-9]\d{0,5})?")


@dataclass(frozen=True)
class BatchJob:
    """A job for a scheduler. It runs `meshwise run WORDS` in the folder `workdir`."""

    name: str
    workdir: Path
    run: Path
    words: Sequence[str]
    nodes: str
    seconds: float | None
    gpus: int
    command: Sequence[str]
    site: Site
    options: Sequence[str] = ()


def nodes_of(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes that a text such as `4` or `2-8` allows."""
    if not _NODES.fullmatch(text):
        raise UsageError(f"--nodes must be a number such as 4, or a range such as 2-8, but it is {text}.")
    low, _, high = text.partition("-")
    if int(high or low) < int(low):
        raise UsageError(f"--nodes {text}: the first number must be the smaller one. Write {high}-{low}.")
    return int(low), int(high or low)


def batch_script(job: BatchJob) -> str:
    """Return the text of the job's batch script. Raises UsageError for a value with a line break."""
    low, high = nodes_of(job.nodes)
    lines = ["#!/bin/bash", f"# {_one_line(job.name)}: written by meshwise submit. By hand: sbatch submit.sh"]
    lines += [f"#SBATCH {line}" for line in _options(job, elastic=low != high)]
    lines += ["", f"cd {_quoted(job.workdir)} || exit 2"]
    lines += [_SETUP_FAILED, *job.site.setup, "trap - ERR"] if job.site.setup else []
    lines += [f': "${{{name}:?the job needs it: export {name} before sbatch}}"' for name in job.site.secrets]
    if job.site.cpus:
        lines += ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it over from Slurm 22.05 on"]
    lines += [f"run={_quoted(job.run)}${{SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}  # found again by every start"]
    return "\n".join([*lines, "", *(_step(job) if low == high else _steps(job, low)), "", *_AGAIN, ""])


def _options(job: BatchJob, *, elastic: bool) -> list[str]:
    """Return the options of sbatch, one per line."""
    site = job.site
    named = {"partition": site.partition, "account": site.account, "qos": site.qos, "mem": site.memory}
    lines = [f"--job-name={_word(job.name)}", f"--nodes={job.nodes}"]
    # With a number of tasks, Slurm allocates the fewest nodes of a range, so only the job step sets a number.
    lines += ["--no-kill  # a lost node does not end the job: the run starts again on the others"] if elastic else []
    lines += [] if elastic else ["--ntasks-per-node=1  # meshwise starts the workers of a node itself"]
    if job.gpus and site.gpus != "none":
        kind = f"{site.gpu_type}:" if site.gpu_type else ""
        lines += [f"--gres=gpu:{kind}{job.gpus}" if site.gpus == "gres" else f"--gpus-per-node={kind}{job.gpus}"]
    lines += [f"--cpus-per-task={site.cpus}"] if site.cpus else []
    lines += [f"--{option}={_word(value)}" for option, value in named.items() if value]
    lines += [f"--time={slurm_time(job.seconds)}"] if job.seconds is not None else []
    lines += ["--requeue  # after a lost node or a preemption Slurm starts it again", "--open-mode=append"]
    lines += [_word(option) for option in site.options]
    return [*lines, " ".join(map(_word, job.options))] if job.options else lines


def _step(job: BatchJob, srun: str = "srun") -> list[str]:
    return [
        "# Slurm's signals reach the ranks too, which save and end by them: this script only waits for that.",
        "trap : TERM USR1 USR2",
        f"{srun} {_command(job)} &",
        "while kill -0 $! 2>/dev/null; do wait $!; done",
        "wait $!",
        "code=$?",
    ]


def _steps(job: BatchJob, least: int) -> list[str]:
    """Return the lines of a job that goes on with the nodes that are left, if these are at least `least`."""
    words = "srun --no-kill --wait=15 --overlap --ntasks-per-node=1"
    first, trap, *step = _step(job, f'{words} --nodes="$(wc -w <<<"$up")" --nodelist="${{up// /,}}"')
    return [
        first,
        trap,
        'up=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | xargs)',
        "while :; do",
        *[f"    {line}" for line in step],
        *_LEFT.replace("LEAST", str(least)).splitlines(),
        "done",
    ]


def _command(job: BatchJob) -> str:
    site, words = job.site, list[str]()
    if site.container and site.runtime == "pyxis":
        words += [f"--container-image={site.container}", f"--container-workdir={job.workdir}"]
        words += [f"--container-mounts={','.join(site.mounts)}"] if site.mounts else []
    elif site.container:
        binds = [word for mount in site.mounts for word in ("--bind", mount)]
        words += [site.runtime, "exec", *(["--nv"] if job.gpus else []), *binds, site.container]
    words += [*job.command, "run", "--folder"]
    return " ".join([*map(_quoted, words), '"$run"', *map(_quoted, job.words)])


_SETUP_FAILED = """\
trap 'code=$? line=$LINENO; [ ${#BASH_SOURCE[@]} -gt 1 ] || {
    echo "setup of the site: $(sed -n ${line}p "$0"): exit code $code. Nothing was started." >&2; exit 2; }' ERR"""
_LEFT = """\
    [ $code = 85 ] && [ ! -e "$run/stop" ] || break
    # Is a node lost? Each is asked, since Slurm itself takes minutes to notice. The run goes on at once on the others.
    left=$(for node in $up; do
        timeout 8 srun --quiet --overlap --nodes=1 --ntasks=1 --nodelist="$node" true 2>/dev/null && echo "$node"
    done | xargs)
    [ "$left" != "$up" ] && [ "$(wc -w <<<"$left")" -ge LEAST ] || break
    echo "nodes $up: only $left answer"
    up=$left"""
_AGAIN = """\
# 85 asks for another start, no other code does. Only the start that Slurm counts asks for it, and only while it runs or
# has come to its limit: a job that was cancelled, or that Slurm has requeued itself, is left alone. So is one that
# meshwise stop has stopped.
if [ $code = 85 ] && [ ! -e "$run/stop" ]; then
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    state=$(squeue --noheader --jobs "$job" --format "%T %r")
    starts=$(scontrol show job "$job" | grep -o "Restarts=[0-9]*")
    case "$state" in
    "RUNNING "* | "COMPLETING TimeLimit")
        [ "$starts" = "Restarts=${SLURM_RESTART_COUNT:-0}" ] && scontrol requeue "$job" ;;
    esac
fi
exit $code""".splitlines()


def slurm_time(seconds: float) -> str:
    """Format a duration for Slurm, rounded up to whole minutes, such as `1-04:30:00`."""
    minutes = max(1, -(-int(seconds) // 60))
    days, minutes = divmod(minutes, 24 * 60)
    clock = f"{minutes // 60:02}:{minutes % 60:02}:00"
    return f"{days}-{clock}" if days else clock


def _quoted(word: object) -> str:
    """Quote a word for the shell. Raises UsageError for a line break."""
    return shlex.quote(_one_line(str(word)))


def _word(value: str) -> str:
    """Format a value for an #SBATCH line, in quotes if needed."""
    text = _one_line(value)
    if not re.search(r"[\s#'\"\\]", text):
        return text
    if re.search(r"[\"\\]", text):
        raise UsageError(f"{text}: an #SBATCH line cannot contain a quote or a backslash. Remove it.")
    return f'"{text}"'


def _one_line(text: str) -> str:
    if any(ord(letter) < 32 or letter == "\x7f" for letter in text):
        raise UsageError(f"{text!r}: a batch script cannot contain a line break or a control character. Remove it.")
    return text
