"""What a run says of a script that was not checked, or whose check found a difference."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rich.console import Console

from meshwise.launcher import script as script_file
from meshwise.records.checked import RUNS, code_key, remember
from meshwise.training.job.options import RunOptions

SCRIPT = 'import net\nmodel = mw.distribute(net.Net(), view="rank")\nlr = 0.1\n'


def written(folder: Path, text: str = SCRIPT, net: str = "class Net:\n    pass\n") -> Path:
    (folder / "net.py").write_text(net)
    (folder / "train.py").write_text(text)
    return folder / "train.py"


@pytest.mark.parametrize(
    ("text", "net", "same"),
    [
        (SCRIPT.replace("0.1", "0.2 # less"), '"""A net."""\nclass Net:\n    "Flat."\n    pass\n', True),
        (SCRIPT.replace("0.1", "rank()"), "class Net:\n    pass\n", False),
        (SCRIPT, "class Net(Base):\n    pass\n", False),
    ],
)
def test_a_change_of_code_is_a_new_key_and_constants_are_none(text: str, net: str, same: bool, tmp_path: Path) -> None:
    key = code_key(written(tmp_path))
    assert key
    assert (code_key(written(tmp_path, text, net)) == key) == same


@pytest.mark.parametrize("text", ["mw.distribute(model)", 'mw.distribute(model, view="whole")', "DDP(model)", "a b"])
def test_a_script_that_sees_whole_batches_has_no_key(text: str, tmp_path: Path) -> None:
    assert code_key(written(tmp_path, text)) == ""


def test_a_run_says_once_that_its_code_was_not_checked_and_each_time_that_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script_file, "supervised", lambda *given: ([], 0))
    written(tmp_path)

    def notes(devices: str = "2xcpu", **more: object) -> list[str]:
        options = RunOptions(job="train.py", devices=devices, **more)  # type: ignore[arg-type]
        script_file.start_script(["--lr", "1"], options, Console(quiet=True), time.time(), lambda given: None)
        return [line for line in capfd.readouterr().err.splitlines() if line.startswith("note: ")]

    assert notes("1xcpu") == []
    new = ["note: not checked on 2 devices since its code changed: meshwise check train.py --lr 1"]
    assert [notes(), notes()] == [new, []]
    remember(RUNS, code_key(Path("train.py")), "different")
    differs = ["note: its last check found a difference: meshwise check train.py --lr 1"]
    assert [notes(folder=Path("one")), notes(folder=Path("one")), notes(out="other")] == [differs, [], differs]
    remember(RUNS, code_key(Path("train.py")), "equal")
    assert notes() == []
    remember(Path("train.py"), "a key", "equal")  # not a folder: nothing is remembered, and nothing fails
