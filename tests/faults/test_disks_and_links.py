"""A disk that is full or rots, a link that is closed: training goes on, or goes back, with the same numbers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwise.records import folder as names
from meshwise.records.checkpoints import checkpoints_in, verified
from meshwise.records.files import read_lines
from tests.faults.runs import LOOP_WITHOUT_STATE, CommandRun, run_folder
from tests.faults.test_restarts import final, trained

pytestmark = [
    pytest.mark.usefixtures("processes"),
    pytest.mark.skipif(sys.platform != "linux", reason="disks and sockets as Linux has them"),
]
SHARDED = ("--set", "shard=2", "--save-every", "4")
BOTH_KILLED = ("--fault", "kill:rank=0,step=11", "--fault", "kill:rank=1,step=11")
HARMS = """
import contextlib, os, pathlib, socket

def rank_1_harms(end):
    if end.epoch == 1 and mw.rank() == 1 and os.environ["MESHWISE_ATTEMPT"] == "1":
        harm()

job = dataclasses.replace(job, callbacks=(rank_1_harms,))

def harm():
"""
ROTS = "    newest = max(pathlib.Path('RUNS').glob('*/checkpoint/step-*/rank1.safetensors'))\n"
CORRUPT = f"{ROTS}    data = newest.read_bytes()\n    newest.write_bytes(data[:-1] + bytes([data[-1] ^ 8]))\n"
CUT = f"{ROTS}    os.truncate(newest, newest.stat().st_size // 2)\n"
CLOSES = """
    store = int(os.environ["MASTER_PORT"])
    for fd in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
            if each.family == socket.AF_INET and store not in {each.getsockname()[1], each.getpeername()[1]}:
                each.shutdown(socket.SHUT_RDWR)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("whole"), *SHARDED)[1]


def same(folder: Path, whole: Path) -> bool:
    return final(folder) == final(whole) and read_lines(folder / names.METRICS) == read_lines(whole / names.METRICS)


def harmed(text: str, out: Path, *words: str) -> tuple[CommandRun, Path]:
    """The run of a job in which something happens to rank 1, after its first epoch of ten steps."""
    script, job = out / "job.py", Path(__file__).with_name("job_with_state.py").read_text()
    script.write_text(f"import dataclasses\n{job}{text.replace('RUNS', str(out / 'runs'))}")
    run = CommandRun(f"{script}:job", "--devices", "2xcpu", *words, "--out", str(out / "runs"), out=out)
    run.wait()
    return run, run_folder(out)


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_whose_folder_is_gone_trains_on_and_ends_with_1(moved: bool, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP_WITHOUT_STATE.replace("40000", "1600").replace("0.02", "0.05"))
    run = CommandRun("--devices", "2xcpu", "--out", str(tmp_path / "runs"), str(tmp_path / "loop.py"), out=tmp_path)
    run.wait_for("ten steps")
    folder = run_folder(tmp_path)
    if moved:
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    run.wait_for("was removed or moved. The run continues")
    assert run.wait() == 1 and "ended after 200" in run.output, run.output
    assert f"{folder} was removed or moved during the run" in run.output.splitlines()[-1]
    assert "Traceback" not in run.output and list((tmp_path / "runs").iterdir()) == [] and run.left_over() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rots", "says"),
    [(CORRUPT, "rank1.safetensors is damaged: its hash differs"), (CUT, "rank1.safetensors has ")],
)
def test_a_checkpoint_that_rots_is_noticed_and_the_one_before_it_is_taken(
    rots: str, says: str, undisturbed: Path, tmp_path: Path
) -> None:
    run, folder = harmed(HARMS + rots, tmp_path, *SHARDED, *BOTH_KILLED)
    assert run.process.returncode == 0 and "did not happen" not in run.output, run.output
    assert f"the checkpoint of step 8 is not used: {says}" in run.output, run.output
    assert names.read_run(folder)["sessions"][1]["from_step"] == 4
    assert same(folder, undisturbed)


@pytest.mark.slow
def test_a_link_that_is_closed_is_told_as_one_and_the_run_goes_on_at_once(tmp_path: Path) -> None:
    run, folder = harmed(HARMS + CLOSES, tmp_path, "--save-every", "4")
    assert run.process.returncode == 0, run.output
    assert "The ranks lost their connections to each other, but all ranks still run. Check the network" in run.output
    first, second = names.read_run(folder)["sessions"]
    assert first["kind"] == "link" and second["steps_lost"] <= 3
    assert run.left_over() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root mounts a disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


FILLS = """
def fill(end):
    if end.epoch == 1 and mw.rank() == 0:
        with open("DISK/fill", "wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    break

job = dataclasses.replace(job, callbacks=(fill,))
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full_stops_no_training(small_disk: Path, tmp_path: Path) -> None:
    """But its states and its weights cannot be kept: the first of the states in a row is told, and the weights."""
    script = tmp_path / "job.py"
    text = Path(__file__).with_name("job_with_state.py").read_text()
    script.write_text(f"import dataclasses\n{text}{FILLS.replace('DISK', str(small_disk))}")
    run = CommandRun(f"{script}:job", "--devices", "2xcpu", *SHARDED, "--out", str(small_disk / "runs"), out=tmp_path)
    assert run.wait() == 1, run.output
    assert "step 12 could not be saved: " in run.output and run.output.count("could not be saved: ") == 1
    assert "epoch 2/2, step 20  test loss" in run.output
    assert "SaveError: the " in run.output
    (folder,) = (small_disk / "runs").iterdir()
    assert {verified(saved) for saved in checkpoints_in(folder / names.CHECKPOINTS)} == {""}
    assert run.left_over() == []
