"""The files of a program, as they were when it was checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwise.launcher.code_files import changed_code, code_files, refuse_changed_code, write_code
from meshwise.spec.errors import UsageError


def test_the_files_of_a_program_are_the_python_files_of_its_folder(tmp_path: Path) -> None:
    for name in ("train.py", "lib/layers.py", ".hidden/x.py", "env/y.py", "runs/one/z.py", "data.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "runs" / "one" / "run.json").touch()
    assert sorted(code_files(f"{tmp_path}/train.py:job")) == ["lib/layers.py", "train.py"]
    assert code_files("mnist-mlp") == {}


def test_what_changed_is_named(tmp_path: Path) -> None:
    program, run = tmp_path / "train.py", tmp_path / "runs" / "one"
    program.write_text("1\n")
    (tmp_path / "gone.py").write_text("1\n")
    run.mkdir(parents=True)
    write_code(run, str(program))
    assert changed_code(run, str(program)) == []
    program.write_text("2\n")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "new.py").write_text("1\n")
    assert changed_code(run, str(program)) == ["gone.py", "new.py", "train.py"]
    with pytest.raises(UsageError, match=r"gone.py, new.py, train.py changed after"):
        refuse_changed_code(run, str(program))


def test_a_run_that_was_not_sent_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1\n")
    assert changed_code(tmp_path, str(tmp_path / "train.py")) == []
