"""How the launchers of a run end, for an engine that starts only those again that do not end with 0: of
launcher/supervise.py, launcher/placing.py and launcher/commands/run.py. With pods: engines/test_several_pods.py."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwise.launcher import supervise
from meshwise.launcher.commands import run as command
from meshwise.launcher.placing import ASKED, is_done
from meshwise.records import folder as names
from meshwise.spec.exit_codes import AGAIN, DONE
from meshwise.training.job.options import RunOptions
from meshwise.workers.gate import Halt

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def finished(folder: Path, **more: Any) -> RunOptions:
    """The options of a run that has finished."""
    options = RunOptions(job="train.py:job", folder=folder, save_every="4")
    folder.mkdir()
    names.write_run(folder, {"job": "train.py:job", "status": "finished", ASKED: options.record(), **more})
    return options


def test_a_run_that_has_finished_is_done_for_an_engine(tmp_path: Path) -> None:
    options = finished(tmp_path / "run")
    assert is_done(options, IN_A_POD)
    assert not is_done(options, {})  # a person may go on with it
    assert not is_done(RunOptions(job="train.py:job"), IN_A_POD)


@pytest.mark.parametrize("more", [{"status": "failed"}, {"status": "stopped"}, {ASKED: {"job": "other.py:job"}}])
def test_any_other_run_is_not_done(more: dict[str, Any], tmp_path: Path) -> None:
    assert not is_done(finished(tmp_path / "run", **more), IN_A_POD)
    assert not is_done(RunOptions(job="train.py:job", folder=tmp_path / "none"), IN_A_POD)


@pytest.mark.parametrize(("asked", "code_of_0"), [(False, AGAIN), (True, DONE)])
def test_every_machine_ends_as_machine_0_does(asked: bool, code_of_0: int, tmp_path: Path) -> None:
    """A signal that comes with the last step reaches some of the machines."""
    halt, said = Halt(), dict[str, int]()
    if asked:
        halt.ask(signal.SIGUSR1)
    meeting = SimpleNamespace(set=said.__setitem__, get=lambda node, name: code_of_0)
    started: Any = SimpleNamespace(folder=tmp_path, meeting=meeting, keeps_record=False)
    viewer: Any = SimpleNamespace(stops=lambda: None, stopped="")
    assert supervise._record_end(started, viewer, halt) == code_of_0
    assert said == {"ended": AGAIN if asked else DONE}


def test_process_1_ends_by_a_signal_before_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    command._end(signal.SIGTERM, None)
    assert codes == [AGAIN]
