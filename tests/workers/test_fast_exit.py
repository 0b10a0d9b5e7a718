"""What a worker leaves behind when it ends (workers/fast_exit.py): all that Python would have written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import atexit, threading, time
import beside
held = open("held.txt", "w")  # by the thread
held.write("x" * 10)
atexit.register(print, "exit function")

def waits():
    time.sleep(0.2)
    print("thread")

def goes_on():
    while held and beside.names:
        time.sleep(0.0001)

threading.Thread(target=waits).start()
threading.Thread(target=goes_on, daemon=True).start()
print("end", end=" ")
"""
WORKER = """
from meshwise.workers import fast_exit
import runpy
runpy.run_path("program.py", run_name="__main__")
fast_exit.exit_now(3)
"""


def test_threads_exit_functions_and_open_files_end_as_ever(processes: None, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("names = ['a']\nfile = open('beside.txt', 'w')\nfile.write('y' * 5)")
    ended = subprocess.run(
        [sys.executable, "-c", WORKER],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    assert (ended.returncode, ended.stderr) == (3, "") and ended.stdout == "end thread\nexit function\n"
    assert (tmp_path / "held.txt").read_text() == "x" * 10 and (tmp_path / "beside.txt").read_text() == "y" * 5


def test_a_program_that_is_not_told_to_leave_ends_by_itself(processes: None, tmp_path: Path) -> None:
    text = "from meshwise.workers import fast_exit; raise SystemExit(5)"
    assert subprocess.run([sys.executable, "-c", text], cwd=tmp_path).returncode == 5
