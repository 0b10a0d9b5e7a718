"""What starts without torch: the help of every command, the list of runs, a report, and the launcher of a script or
a job, which leaves launcher/training.py to its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import typer

from meshwise import checker, cli, launcher
from meshwise.launcher.commands.run import typed
from meshwise.reports.views.registry import VIEWS

Command = Callable[..., tuple[int, str, str]]
OLD = Path(__file__).parents[1] / "old" / "runs"
WITHOUT_TORCH = """
import sys
from meshwise import cli

for words in sys.argv[1].split(";"):
    sys.argv = ["meshwise", *words.split()]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
    loaded = sorted({"torch", "transformers", "torchvision"} & sys.modules.keys())
    assert not loaded, f"meshwise {words} imported {loaded}"
print("none of them")
"""


def without_torch(folder: Path, *commands: str) -> str:
    """What the commands print, all of them in one process that fails when torch is imported."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    line = [sys.executable, "-c", WITHOUT_TORCH, ";".join(commands)]
    ended = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_help_runs_and_reports_import_no_torch(processes: None, tmp_path: Path) -> None:
    helps = [f"{command} --help" for command in cli.COMMANDS]
    drawn = [f"report {OLD / 'finished'} --to {tmp_path} --{view}" for view in VIEWS]
    shown = without_torch(
        tmp_path,
        "-h",
        *helps,
        "runs -h",
        "runs remove -h",
        "--version",
        f"runs --in {OLD}",
        f"check --static {__file__}",
        f"report {OLD / 'finished'}",
        f"report {OLD / 'finished'} {OLD / 'shard'}",
        *drawn,
    )
    assert "none of them" in shown and (tmp_path / "report.html").exists()


def test_the_launcher_of_a_script_imports_no_torch(processes: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('from a worker')")
    assert "from a worker" in without_torch(tmp_path, "run --devices 1xcpu train.py")


@pytest.mark.parametrize("plan", ["", "--set shard=2 --set recompute=full"])
def test_the_launcher_of_a_job_imports_no_torch(processes: None, tmp_path: Path, plan: str) -> None:
    """It took 220 MB beside its workers, and two seconds before they began."""
    assert "none of them" in without_torch(
        tmp_path, f"run --devices 2xcpu --epochs 1 --batch-size 4096 {plan} mnist-mlp"
    )


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_the_help_of_a_command_has_examples(verb: str, command: Command) -> None:
    code, shown, _ = command(verb, "-h")
    written = getattr(import_module(cli.COMMANDS[verb]), verb).__doc__ or ""
    examples = [line.strip() for line in written.splitlines() if line.strip().startswith(f"meshwise {verb}")]
    assert code == 0 and len(examples) >= 3
    assert {f" {line}" for line in examples} <= {line.rstrip() for line in shown.splitlines()}


def ends_with_7(*_: object) -> None:
    raise typer.Exit(7)


def test_run_says_at_once_that_it_starts(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nothing.py").touch()
    monkeypatch.setattr(launcher.script, "start", ends_with_7)
    for words, said in (("--devices 2xcpu", "starting    2xcpu"), ("", "starting    the workers")):
        code, _, shown = command("run", *words.split(), "nothing.py")
        assert code == 7 and shown.splitlines()[0] == said


def test_a_check_imports_torch_in_its_fork_server_beside_its_own_process(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[object] = []
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("meshwise.checker.commands.check.sys", SimpleNamespace(modules={}))
    monkeypatch.setattr("meshwise.checker.commands.check.Forks.server", lambda forks, variables: begun.append(forks))

    def ends(options: object, forks: object) -> None:
        assert begun == [forks]
        raise typer.Exit(7)

    monkeypatch.setattr(checker.check, "check_options", ends)
    assert command("check", "train.py")[0] == 7


def test_a_run_began_when_it_was_typed() -> None:
    assert abs(typed() - psutil.Process().create_time()) < 1.5
