"""What a shell gets when it asks `meshwise` what to complete, in the way in which bash asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from meshwise.terminal import completion
from meshwise.training.jobs.registry import BUILT_IN
from meshwise.training.tracking.trackers import TRACKERS

Command = Callable[..., tuple[int, str, str]]
Complete = Callable[[str], list[str]]


@pytest.fixture
def complete(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Complete:
    """The words that bash is given for a line, of which the last word is not finished."""
    monkeypatch.chdir(tmp_path)

    def words(line: str) -> list[str]:
        monkeypatch.setenv("_MESHWISE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        code, out, _ = command()
        assert code == 0
        return out.split()

    return words


def test_commands(complete: Complete) -> None:
    assert complete("meshwise ru") == ["run", "runs"]
    assert complete("meshwise nonsense x") == []  # and no traceback


def test_options(complete: Complete) -> None:
    assert complete("meshwise run --dev") == ["--devices"]
    assert "--html" in complete("meshwise report --")


def test_jobs_and_scripts(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "big.py").touch()
    assert complete("meshwise run m") == ["mlp", "mnist-cnn", "mnist-mlp", "mine.py", "models/"]
    assert complete("meshwise check models/") == ["models/big.py"]


def test_plans_and_devices(complete: Complete, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").touch()
    assert complete("meshwise run --set sh") == ["shard=", "shares="]
    assert complete("meshwise run --plan p") == ["plan.toml"]
    assert complete("meshwise run --log w") == ["wandb"]
    assert complete("meshwise run --devices 2x") == ["2xcpu", "2xcuda"]


def test_runs(complete: Complete, tmp_path: Path) -> None:
    for name in ("20261121-1-gpt", "20261122-1-gpt"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    (tmp_path / "runs" / "20261123-of-somebody-else").mkdir()
    assert complete("meshwise runs remove 2026") == ["20261122-1-gpt", "20261121-1-gpt"]
    assert complete("meshwise run --resume ru") == ["runs/20261122-1-gpt", "runs/20261121-1-gpt"]


def test_what_is_completed_is_what_there_is() -> None:
    assert set(completion.BUILT_IN) == set(BUILT_IN)
    assert set(completion.TRACKERS) == set(TRACKERS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_is_given_a_script_that_asks_meshwise(
    shell: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: shell)  # else it asks which shell runs the tests
    code, out, _ = command("--show-completion")
    assert code == 0 and "_MESHWISE_COMPLETE" in out
