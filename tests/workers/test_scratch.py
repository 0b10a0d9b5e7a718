"""Temporary folders of commands that were killed are swept by the next command; those of live ones, of other users and
of nobody known stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from meshwise.spec.errors import UsageError
from meshwise.workers.scratch import OWNED, PREFIX, made_folder, own, scratch_folder, sweep

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is swept there")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sweep.cache_clear()
    return tmp_path


def test_a_folder_is_removed_with_all_that_is_in_it(temporary: Path) -> None:
    with scratch_folder("plan") as folder:
        assert folder.parent == temporary and folder.name.startswith("meshwise-plan-")
        (folder / "in").mkdir()
        (folder / "in" / "file").touch()
        sweep.__wrapped__(str(temporary))
        assert (folder / "in" / "file").exists()
    assert not list(temporary.iterdir())


def test_what_a_killed_owner_has_left_is_swept_by_the_next_folder(temporary: Path) -> None:
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = made_folder()
        (kept[0] / "task.pickle").touch()
        os.write(say, str(kept[0]).encode())
        time.sleep(60)
        os._exit(1)
    left = Path(os.read(ready, 1000).decode())
    sweep.__wrapped__(str(temporary))
    assert (left / "task.pickle").exists()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    sweep.cache_clear()
    with scratch_folder():
        assert not left.exists()
    os.close(ready)
    os.close(say)


def test_a_folder_of_several_owners_stays_until_the_last_is_gone(temporary: Path) -> None:
    folder, first = made_folder("verbs")
    second = own(folder)
    first.close()
    sweep.__wrapped__(str(temporary))
    assert folder.exists()
    second.close()
    sweep.__wrapped__(str(temporary))
    assert not folder.exists()


def test_what_is_not_known_to_be_ours_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / f"{PREFIX}without-owner").mkdir()
    (temporary / "other").mkdir()
    (temporary / "other" / OWNED).touch()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "other")
    (temporary / f"{PREFIX}file").touch()
    before = sorted(temporary.rglob("*"))
    sweep.__wrapped__(str(temporary))
    assert sorted(temporary.rglob("*")) == before
    folder, owned = made_folder()
    owned.close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # as another user
    sweep.__wrapped__(str(temporary))
    assert folder.exists()


def test_where_nothing_can_be_written_the_folder_is_named(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "file"))
    with pytest.raises(UsageError, match=r"a temporary folder cannot be created in .*file .* Set TMPDIR to a folder"):
        made_folder()


@pytest.mark.slow
def test_a_run_that_was_killed_leaves_nothing_for_long(own_fork_server: None, temporary: Path) -> None:
    code = "import time, meshwise as mw\nmw.launch(lambda: time.sleep(60), devices='2xcpu')"
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(temporary)}) as run:
        while not list(temporary.glob(f"{PREFIX}*/task.pickle")):
            assert run.poll() is None
            time.sleep(0.05)
        run.kill()
    (left,) = temporary.glob(f"{PREFIX}*")
    with scratch_folder():
        assert not left.exists()
