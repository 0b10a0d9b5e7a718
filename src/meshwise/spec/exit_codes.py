"""Define the exit codes of a run.

Schedulers, and people who restart the run, may rely on them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

DONE, FAILED, USAGE, NOT_JUDGED, AGAIN, NO_PROGRESS, INTERRUPTED = 0, 1, 2, 4, 85, 93, 130
"""Exit codes (see MEANINGS). NOT_JUDGED: `meshwise check` found no fault, but did not judge everything."""
TIME_LIMIT = int(signal.SIGALRM)
"""A signal number. It is recorded as the reason for the end of a run that its time limit has stopped."""
WARNINGS = (int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGUSR2))
"""The signals that schedulers send some time before they kill a job, often to every process of a task."""
OF_SCHEDULERS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "KUBERNETES_SERVICE_HOST")
"""Environment variables that schedulers set in the processes they start."""
MEANINGS = {
    str(DONE): "done",
    str(FAILED): "the program failed (an exception, a loss that is not finite); starting it again will not help",
    str(USAGE): "the request cannot work; one sentence says what to use instead",
    str(AGAIN): "start it again with --resume: stopped by SIGUSR1, SIGUSR2, its time limit or a scheduler's SIGTERM, "
    "or ended by a machine fault after the last of --restarts",
    str(NO_PROGRESS): "three attempts in a row made no step of progress; starting it again will not help",
    "129, 130, 143": "stopped by a closed terminal, Ctrl-C, or SIGTERM outside a scheduler; saves a state or says "
    "why not",
}


def under_scheduler(environment: Mapping[str, str] = os.environ) -> bool:
    """Check whether a scheduler such as Slurm or Kubernetes has started the process with this environment."""
    return any(name in environment for name in OF_SCHEDULERS)


def code_of_stop(number: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the exit code of a run that the signal `number` stopped.

    It is 85 if the run should be started again, and otherwise 128 + the number of the signal.
    """
    scheduled = number == signal.SIGTERM and under_scheduler(environment)
    return AGAIN if scheduled or number in (TIME_LIMIT, signal.SIGUSR1, signal.SIGUSR2) else 128 + number


def stop_text(number: int) -> str:
    """Return what stopped a run, in words: `Ctrl-C`, `SIGTERM`, `its time limit`."""
    told = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGHUP): "a closed terminal", TIME_LIMIT: "its time limit"}
    return told.get(number) or next((name.name for name in signal.Signals if name == number), f"signal {number}")
