"""What the launchers of several machines compare before they start workers. Of launcher/start.py."""

from __future__ import annotations

from pathlib import Path

from meshwise.launcher.start import _compared
from meshwise.launcher.supervise import LaunchedProgram
from meshwise.training.job.options import RunOptions


def test_the_files_of_the_program_are_compared(tmp_path: Path) -> None:
    facts = []
    for text in ("lr = 0.1\n", "lr = 0.2\n"):
        folder = tmp_path / f"machine {text[-2]}"
        folder.mkdir()
        (folder / "train.py").write_text("import own\n")
        (folder / "own.py").write_text(text)
        program = LaunchedProgram(str(folder / "train.py"), None, lambda folder: None, {})
        facts.append(_compared(program, RunOptions(job=str(folder / "train.py"))))
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"file own.py"}
    assert facts[0]["file train.py"] == facts[1]["file train.py"]
