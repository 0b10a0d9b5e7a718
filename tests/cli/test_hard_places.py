"""Commands where the system gives little: closed files, a full disk for what is printed, few open files, TMPDIR that
cannot be written, a reader that leaves. They do what they should, or end with one sentence."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise import cli

SMALL = "run mlp --devices 2xcpu --epochs 1 --batch-size 20000"


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
        f"ulimit -n 64; meshwise {SMALL}",
    ],
)
def test_a_run_ends_well(line: str, tmp_path: Path) -> None:
    assert shell(line, tmp_path)[0] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("own_fork_server")
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (f"meshwise {SMALL} > /dev/full", 1, "MeshwiseError: the output cannot be written: No space left on device."),
        ("meshwise report nothing >&-", 2, "nothing: no run folder"),
        (f"ulimit -n 40; meshwise {SMALL}", 2, "48 files or more, and this limit is 40. Raise it: ulimit -n 4096."),
        (f"ulimit -n 12; meshwise {SMALL}", 1, "too many files are open for this limit. Raise it: ulimit -n 4096."),
    ],
)
def test_a_command_ends_with_a_sentence(line: str, code: int, said: str, tmp_path: Path) -> None:
    ended, beside = shell(line, tmp_path)
    assert (ended, said in beside.strip().splitlines()[-1]) == (code, True), beside
