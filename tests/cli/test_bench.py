"""`meshwise bench` and `meshwise devices`, as they are typed: forms, exit codes, Ctrl-C, what cannot be."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from meshwise.hardware.machines import find_machine, read_machine

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, processes: None) -> tuple[Path, dict]:  # type: ignore[type-arg]
    """A small bench of two workers: its machine file and its JSON."""
    file = tmp_path_factory.mktemp("bench") / "here.toml"
    words = ["bench", "--devices", "2xcpu", "--sizes", "1K:64K", "--seconds", "3", "--json", "--save", str(file)]
    done = subprocess.run([sys.executable, "-m", "meshwise", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"written     {file}" in done.stderr and "measured    all-reduce, gloo:" in done.stderr
    return file, json.loads(done.stdout)


def test_json_has_every_path_checked(saved: tuple[Path, dict]) -> None:  # type: ignore[type-arg]
    told = saved[1]
    operations = [result["operation"] for result in told["results"]]
    assert operations.count("copy") == 2 and {"all-reduce", "all-gather", "broadcast"} <= set(operations)
    assert all(result["wrong"] is None and result["sizes"] for result in told["results"])
    assert told["exit_code"] == 0
    assert [device["name"] for device in told["machine"]["devices"]] == ["cpu:0", "cpu:1"]


def test_the_machine_file_is_read_as_it_was_measured(saved: tuple[Path, dict]) -> None:  # type: ignore[type-arg]
    machine = read_machine(saved[0])
    assert machine.name == "2xcpu" and "torch" in machine.measured
    assert {link.kind for link in machine.links} == {"process"} and machine.collectives
    assert all(device.memory_rate and device.matmuls and device.launch for device in machine.devices)
    assert find_machine(saved[0]) == machine


def test_devices_shows_a_machine_file(saved: tuple[Path, dict], command: Command) -> None:  # type: ignore[type-arg]
    code, out, _ = command("devices", saved[0])
    assert code == 0 and "cpu:1" in out


@pytest.mark.usefixtures("processes")
def test_a_saved_file_may_be_written_again_and_nothing_else(
    saved: tuple[Path, dict],
    command: Command,
    tmp_path: Path,  # type: ignore[type-arg]
) -> None:
    other = tmp_path / "notes.toml"
    other.write_text("mine = 1\n")
    code, _, err = command("bench", "--save", other)
    assert code == 2 and "is not a machine file. Use another." in err and other.read_text() == "mine = 1\n"
    again = tmp_path / "again.toml"
    again.write_bytes(saved[0].read_bytes())
    code, _, _ = command("bench", "--links", "--devices", "2xcpu", "--sizes", "1K", "--seconds", "0.5", "--save", again)
    assert code == 0 and again.read_bytes() != saved[0].read_bytes()


def ended_by(how: Callable[[subprocess.Popen[str]], object], **variables: str) -> tuple[int, str]:
    """A bench to which this is done once it has measured something: its exit code, and what it prints."""
    words = ["bench", "--links", "--collectives", "--devices", "2xcpu", "--sizes", "1K:16K", "--seconds", "60"]
    command = [sys.executable, "-m", "meshwise", *words]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=os.environ | variables) as process:
        assert process.stderr is not None and process.stdout is not None
        assert process.stderr.readline().startswith("measured    copy cpu:0 -> cpu:1, gloo:")
        how(process)
        out = process.stdout.read()
        return process.wait(timeout=30), out


@pytest.mark.usefixtures("processes")
def test_ctrl_c_keeps_what_is_done() -> None:
    code, out = ended_by(lambda process: process.send_signal(signal.SIGINT))
    assert code == 130
    assert "cpu:0 → cpu:1" in out and "stopped     by Ctrl-C" in out and "Traceback" not in out


HERE = "[[device]]\npart = 'H100-SXM'\nmemory = '80 GB/s'\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "--sizes", "1X"], "--sizes 1X is not a range of sizes. Write --sizes 1K:1G"),
        (["bench", "--sizes", "1K:512T", "--devices", "2xcpu"], "are free. Write at most --sizes 1K:"),
        (["bench", "--seconds", "0"], "--seconds must be from 0.1 to 86400, but it is 0"),
        (["bench", "--devices", "2xcup"], "unknown kind of device 'cup'. Did you mean 'cpu'?"),
        (["bench", "--save", "nowhere/here.toml"], "must be a file in an existing folder"),
        (["bench", "--save", "."], "must be a file in an existing folder"),
        (["bench", "--hosts"], "only this one takes part. Start the command on each host, for example with torchrun"),
        (["bench", "--hosts", "--compute"], "Remove --compute and --devices"),
        (["devices", "8xH1000"], "'H1000' is not a known device. Nearest are"),
        (["devices", "3xcup"], "'cup' is not a known device"),
        (["devices", "wrong.toml"], "'GB/s' is a unit of bytes/s, but bytes are needed. Write it as"),
        (["devices", "binary.toml"], "cannot be read as a machine file (it is not text)"),
        (["devices", "missing.toml"], "cannot be read as a machine file (No such file"),
        (["bnch"], "meshwise bnch: no such command. Did you mean 'bench'?"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.toml").write_text(HERE)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    start = time.monotonic()
    code, out, err = command(*words)
    assert code == 2 and message in err and re.sub(r"\nmore      docs/\S+", "", err).count("\n") == 1 and out == ""
    assert time.monotonic() - start < 30  # refused before anything is measured


@pytest.mark.usefixtures("processes")
def test_devices_without_torch_does_not_import_it_and_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from meshwise import cli; sys.argv = ['meshwise', 'devices', '--no-torch', '--json']\n"
        "try: cli.main()\n"
        "except SystemExit as end: print('torch' in sys.modules, file=sys.stderr); raise"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and done.stderr == "False\n" and list(tmp_path.iterdir()) == []
    told = json.loads(done.stdout)
    assert told["devices"] and told["hosts"][0]["cores"]


def test_devices_in_words_and_here(command: Command) -> None:
    code, out, _ = command("devices", "8xH100")
    assert code == 0 and "NVLink4" in out and "H100-SXM" in out
    code, out, _ = command("devices")
    assert code == 0 and "host" in out and "versions" in out


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.slow
def test_other_signals_end_it_as_a_ctrl_c_does(number: signal.Signals, code: int, tmp_path: Path) -> None:
    ended, out = ended_by(lambda process: process.send_signal(number), TMPDIR=str(tmp_path))
    assert ended == code and f"stopped     by {number.name}" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("own_fork_server")
def test_a_worker_that_dies_ends_it_with_1_and_what_was_measured() -> None:
    code, out = ended_by(lambda process: psutil.Process(process.pid).children(recursive=True)[-1].kill())
    assert code == 1 and "cpu:0 → cpu:1" in out and "killed by SIGKILL" in out


def test_what_is_no_file_is_not_read_for_ever(command: Command, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for words in (["bench", "--save", pipe], ["bench", "--save", "/dev/full"], ["devices", pipe]):
        code, _, err = command(*words)
        assert code == 2 and re.sub(r"\nmore      docs/\S+", "", err).count("\n") == 1


@pytest.mark.usefixtures("processes")
def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "meshwise", "devices", "--no-torch"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and "cannot be written" in done.stderr and "Traceback" not in done.stderr
