"""Commands where the system gives little: closed files, a full disk for what is printed, few open files, small files,
TMPDIR and /dev/shm without room, a reader that leaves. They do what they should, or end with one sentence."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise import cli

SMALL = "run mlp --devices 2xcpu --epochs 1 --batch-size 20000"
CHECK = "check mlp --devices 2xcpu --batch-size 64"
IN_LITTLE_ROOM = "mount -t tmpfs -o size=64k none"


def shell(line: str, folder: Path) -> tuple[int, str]:
    """The exit code of `meshwise` in a shell's line, and what it said on stderr."""
    ours = f"{shlex.quote(sys.executable)} -m meshwise"
    words = ["bash", "-c", f"set -o pipefail; {line.replace('meshwise', ours)}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(words, cwd=folder, env=environment, stderr=-1, stdout=-3, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


def test_a_closed_file_is_not_given_to_what_is_opened_next(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with (tmp_path / "said").open("w") as said:
            for number in (0, 1):
                os.close(number)
            cli._open_standard_files()
            print("to nobody", flush=True)
            said.write(str(os.open(tmp_path, os.O_RDONLY) > 2))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "said").read_text() == "True"


@pytest.mark.slow
@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize(
    "line",
    [
        f"meshwise {SMALL} >&-",
        f"meshwise {SMALL} >&- <&-",
        f"meshwise {SMALL} | head -1",
        f"meshwise {SMALL} 2>/dev/full",
        f"ulimit -n 64; meshwise {SMALL}",
        f"{IN_LITTLE_ROOM} /dev/shm; meshwise {SMALL}",
        f"{IN_LITTLE_ROOM} $TMPDIR; fill=$(cat /dev/zero 2>&1 >$TMPDIR/fill); meshwise {SMALL}",
        f"{IN_LITTLE_ROOM} /dev/shm; meshwise {CHECK}",
        f"ulimit -n 64; meshwise {CHECK}",
        f"meshwise {CHECK} >&-",
        f"meshwise {CHECK} | true",
    ],
)
def test_a_run_or_a_check_ends_well(line: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    if IN_LITTLE_ROOM in line and subprocess.run(["unshare", "-m", "true"], check=False, stderr=-3).returncode:
        pytest.skip("needs a mount of its own: run as root")
    if IN_LITTLE_ROOM in line:
        line = f"unshare -m bash -c {shlex.quote(line)}"
    assert shell(f"export TMPDIR={tmp_path}/tmp; {line}", tmp_path)[0] == 0


@pytest.mark.parametrize(
    "verb",
    [pytest.param("plan mlp --machine 2xcpu", marks=pytest.mark.slow), "report RUN", "report RUN --json"],
)
@pytest.mark.parametrize("end", ["| true", ">&-", "2>/dev/full"])
@pytest.mark.parametrize("limit", ["-n 64", pytest.param("-f 8", marks=pytest.mark.slow)])
def test_a_plan_or_a_report_ends_well(
    verb: str, end: str, limit: str, mnist_run: tuple[Path, str, str], tmp_path: Path
) -> None:
    line = f"ulimit {limit}; meshwise {verb.replace('RUN', str(mnist_run[0]))} {end}"
    assert shell(line, tmp_path)[0] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (f"meshwise {SMALL} > /dev/full", 1, "MeshwiseError: the output cannot be written: No space left on device."),
        ("meshwise plan mlp --machine 2xcpu > /dev/full", 1, "the output cannot be written: No space left on device."),
        (f"meshwise {CHECK} > /dev/full", 1, "MeshwiseError: the output cannot be written: No space left on device."),
        ("meshwise report nothing >&-", 2, "there is no run nothing in runs/"),
        (
            f"ulimit -f 8; meshwise {SMALL}",
            1,
            "A file is larger than is allowed. Raise the limit with ulimit -f unlimited.",
        ),
        (
            f"ulimit -f 8; meshwise {CHECK}",
            2,
            "A file is larger than is allowed. Raise the limit with ulimit -f unlimited.",
        ),
        ("ulimit -f 8; meshwise plan mlp --machine 2xcpu --page plan.html", 1, "cannot be written: File too large."),
        (
            f"ulimit -n 5; meshwise {SMALL}",
            1,
            "more files are open than this shell allows. Raise the limit with ulimit -n 4096.",
        ),
    ],
)
def test_a_command_ends_with_a_sentence(line: str, code: int, said: str, tmp_path: Path) -> None:
    ended, beside = shell(line, tmp_path)
    assert (ended, said in beside.strip().splitlines()[-1]) == (code, True), beside
