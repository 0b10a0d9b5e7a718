"""What is done to a run from outside, once it has saved step 8: to its processes and to its folder. Of `faults.py`."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

MARK = "MESHWISE_BENCH_RUN"
LIMIT = 250.0  # seconds until the run has come so far


def processes_of(mark: str) -> list[psutil.Process]:
    """The living processes of the run that was started with this mark."""
    return [process for process in psutil.process_iter() if _is_of(process, mark)]


def _is_of(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, OSError):
        return False


def _is_server(process: psutil.Process) -> bool:
    """Whether it forks the ranks; they have its command line."""
    parent = process.parent()
    return "--fork-server" in process.cmdline() and parent is not None and "--fork-server" not in parent.cmdline()


def signal_server(number: int, out: Path, mark: str) -> None:
    """Send a signal to the process that forks the ranks."""
    (server,) = (process for process in processes_of(mark) if _is_server(process))
    server.send_signal(number)


def stop_server_and_run(out: Path, mark: str) -> None:
    """Stop the process that forks the ranks, and ask the launcher to end, as a scheduler does."""
    signal_server(signal.SIGSTOP, out, mark)
    launcher(mark).send_signal(signal.SIGTERM)


def launcher(mark: str) -> psutil.Process:
    """The process of the command itself."""
    (server,) = (process for process in processes_of(mark) if _is_server(process))
    parent = server.parent()
    assert parent is not None
    return parent


def interrupt_all(out: Path, mark: str) -> None:
    """Send SIGINT to every process of the run, as `scancel -s INT` does, ranks first."""
    first = launcher(mark)
    for process in (*reversed(first.children(recursive=True)), first):
        process.send_signal(signal.SIGINT)


def kill_loader(out: Path, mark: str) -> None:
    """Kill the loader worker that left its number."""
    os.kill(int((out / "loader").read_text()), signal.SIGKILL)


def remove_folder(out: Path, mark: str) -> None:
    """Remove the run folder."""
    (folder,) = (out / "runs").iterdir()
    while folder.exists():  # a file may come while it is emptied
        shutil.rmtree(folder, ignore_errors=True)


def move_folder(out: Path, mark: str) -> None:
    """Move the run folder elsewhere."""
    (folder,) = (out / "runs").iterdir()
    folder.rename(out / "elsewhere")


ACTIONS: dict[str, Callable[[Path, str], None]] = {
    "stop server": lambda out, mark: signal_server(signal.SIGSTOP, out, mark),
    "kill server": lambda out, mark: signal_server(signal.SIGKILL, out, mark),
    "stop server, end run": stop_server_and_run,
    "interrupt all": interrupt_all,
    "kill loader": kill_loader,
    "kill first loader": kill_loader,
    "remove folder": remove_folder,
    "move folder": move_folder,
}


def act(name: str, out: Path, mark: str, happened: list[str]) -> None:
    """Wait until step 8 is saved or a script is there, or a loader worker where nothing is saved; act, and note what
    was done; else what hindered it."""
    places = ["loader"] if "first" in name else ["runs/*/checkpoint/step-00000008.*", "now-*"]
    until = time.monotonic() + LIMIT
    while not [path for place in places for path in out.glob(place)]:
        if time.monotonic() > until:
            return
        time.sleep(0.01)
    try:
        ACTIONS[name](out, mark)
        happened.append(name)
    except (OSError, psutil.Error, ValueError) as error:
        happened.append(f"not {name}: {error!r}")
