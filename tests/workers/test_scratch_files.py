"""A checked program writes, renames and removes what it likes, reads what it wrote, and the files stay as they were.

Of workers/scratch_files.py and workers/file_view.py.
"""

from __future__ import annotations

import errno
import glob
import io
import logging
import os
import shutil
import sqlite3
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from meshwise.workers.file_view import can_lock, lock_files
from meshwise.workers.scratch_files import scratch_files
from tests.checker.script_sides import as_it_was, proof  # noqa: F401
from tests.checker.scripts import SCRIPT


def _all_files(folder: Path) -> list[tuple[Any, ...]]:
    files = sorted(folder.rglob("*"))
    return [(path, path.is_file() and path.read_bytes(), path.lstat().st_mtime_ns) for path in files]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user's, in which a test changes what it likes; it must not have changed at the end."""
    folder = tmp_path / "project"
    (folder / "data" / "sub").mkdir(parents=True)
    for name, text in {"data/a.txt": "a", "data/b.txt": "b", "data/sub/c": "c", "log.txt": "old\n"}.items():
        (folder / name).write_text(text)
    (folder / "link").symlink_to("data")
    np.save(folder / "array.npy", np.arange(4))
    monkeypatch.chdir(folder)
    before = _all_files(folder)
    short = tempfile.TemporaryDirectory(prefix="meshwise-check-")  # a socket's path has 107 characters at most
    with short as scratch, scratch_files(Path(scratch)):
        yield folder
    assert _all_files(folder) == before
    assert open is io.open and os.getcwd() == str(folder)


def test_what_is_written_is_read_again_beside_what_lies_there(project: Path) -> None:
    with open("log.txt", "a") as file:
        file.write("new\n")
    assert sorted(entry.path for entry in os.scandir("link")) == ["link/a.txt", "link/b.txt", "link/sub"]
    assert Path("log.txt").read_text() == "old\nnew\n"
    Path("link/a.txt").write_text("A")
    assert (project / "data" / "a.txt").read_text() == "A", "by another name"
    assert sorted(os.listdir("data")) == sorted(p.name for p in Path("link").iterdir()) == ["a.txt", "b.txt", "sub"]
    with os.scandir("data") as entries:
        assert {entry.name: entry.is_dir() for entry in entries} == {"a.txt": False, "b.txt": False, "sub": True}
    for folder in ("data", b"data", None):
        with os.scandir(folder) as entries:  # type: ignore[type-var]
            assert all(entry.path == os.path.join(folder or ".", entry.name) for entry in entries)
    assert sorted(map(str, Path("link").iterdir())) == ["link/a.txt", "link/b.txt", "link/sub"]
    array = np.load("array.npy", mmap_mode="r+")
    array[0] = 9
    array.flush()
    assert np.load("array.npy")[0] == 9
    handle = os.open("by hand", os.O_WRONLY | os.O_CREAT)
    os.write(handle, b"x")
    os.close(handle)
    assert Path("by hand").stat().st_size == 1
    os.utime("log.txt", (1, 1))
    os.truncate("log.txt", 1)
    assert (Path("log.txt").stat().st_size, Path("data/sub/c").read_text()) == (1, "c")


def test_what_is_removed_or_renamed_is_gone_and_what_takes_its_place_is_empty(project: Path) -> None:
    Path("data/b.txt").unlink()
    assert not Path("data/b.txt").exists() and sorted(glob.glob("data/*")) == ["data/a.txt", "data/sub"]
    Path("data/a.txt").write_text("A")
    Path("data").rename("moved")
    assert not Path("data").exists() and sorted(map(str, Path("moved").rglob("*"))) == [
        "moved/a.txt",
        "moved/sub",
        "moved/sub/c",
    ]
    assert Path("moved/a.txt").read_text() == "A" and Path("moved/sub/c").read_text() == "c"
    shutil.copytree("moved", "copied")
    shutil.rmtree("moved")
    assert not Path("moved").exists() and Path("copied/sub/c").exists()
    Path("data").mkdir()
    assert not any(Path("data").iterdir())
    shutil.move(shutil.copy("log.txt", "log2.txt"), "copied")
    Path("log.txt").replace("log3.txt")
    assert not Path("log.txt").exists() and Path("copied/log2.txt").read_text() == Path("log3.txt").read_text()
    assert os.path.realpath("link/x") == str(project / "data" / "x")


def test_links_and_the_working_folder_lead_where_they_should(project: Path) -> None:
    Path("runs/1").mkdir(parents=True)
    Path("runs/latest").symlink_to("1")
    Path("runs/absolute").symlink_to(Path("runs/1").absolute())
    Path("other").symlink_to(Path("data").absolute())
    for name in ("runs/latest/x", "runs/absolute/y", "other/z"):
        Path(name).write_text(name)
    assert Path("runs/1/x").exists() and Path("runs/1/y").exists() and Path("data/z").read_text() == "other/z"
    os.chdir("runs/1")
    assert Path.cwd() == project / "runs" / "1"
    Path("here").write_text("")
    os.chdir("../..")
    assert Path("runs/1/here").exists() and Path.cwd() == project
    with tarfile.open("all.tar", "w") as tar:  # it took `open` when it was imported
        tar.add("runs/1")
    assert tarfile.is_tarfile("all.tar")


def test_errors_are_those_of_the_files_themselves(project: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'nowhere/x'"):
        Path("nowhere/x").write_text("")
    with pytest.raises(FileNotFoundError, match="'nothing'"):
        Path("nothing").read_text()
    with pytest.raises(IsADirectoryError):
        Path("data").write_text("")
    with pytest.raises(FileExistsError):
        Path("log.txt").open("x")
    with pytest.raises(FileExistsError):
        Path("data").mkdir()
    with pytest.raises(OSError, match="not empty") as error:
        Path("data").rmdir()
    assert error.value.errno == errno.ENOTEMPTY
    with pytest.raises(IsADirectoryError):
        Path("data").unlink()


def test_libraries_that_open_files_by_themselves_write_there_too(project: Path) -> None:
    torch.save({"a": torch.ones(2)}, "best.pt")
    assert torch.load("best.pt", mmap=True)["a"].sum() == 2
    safetensors.torch.save_file({"a": torch.ones(1)}, filename="a.safetensors")
    assert "a" in safetensors.torch.load_file("a.safetensors")
    with safetensors.safe_open("a.safetensors", "pt") as file:
        assert list(file.keys()) == ["a"]
    base = sqlite3.connect("base.db")
    base.execute("create table t (x)")
    base.close()
    assert Path("base.db").stat().st_size > 0
    handler = logging.FileHandler("train.log")
    handler.close()
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(dir=folder):
        assert len(os.listdir(folder)) == 1
    assert len(list(torch.utils.data.DataLoader(range(4), num_workers=1))) == 4  # its sockets lie beside the files


def test_a_tokenizer_is_saved_there_too(project: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    os.makedirs("out")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save("out/tokenizer.json")
    assert tokenizers.Tokenizer.from_file("out/tokenizer.json").get_vocab() == {"a": 0}


WRITES = """
    import os, shutil
    from torch.utils.tensorboard import SummaryWriter
    if mw.is_main():
        assert epoch > 0 or not os.path.exists("best.pt"), "the other side's"
        os.makedirs("results", exist_ok=True)
        torch.save(model.state_dict(), "results/last.pt")
        os.replace("results/last.pt", "best.pt")
        with open("log.txt", "a") as log:
            log.write(f"{float(loss.detach())}\\n")
        np.save("results/loss.npy", loss.detach().numpy())
        shutil.rmtree("old", ignore_errors=True)
        SummaryWriter("events").close()
    mw.barrier()
    with open("log.txt") as log:
        assert len(log.read().splitlines()) == epoch + 2 and not os.path.exists("old")
    model.load_state_dict(torch.load("best.pt"))
"""


def test_a_script_reads_back_what_it_wrote_and_changes_nothing(pool: Any) -> None:
    Path("old").mkdir()
    Path("old/file").write_text("kept")
    Path("log.txt").write_text("a line\n")
    assert proof(SCRIPT + WRITES, pool).equal
    assert {path.name for path in Path().iterdir()} == {"old", "log.txt", "train.py", "one", "many"}
    assert (Path("old/file").read_text(), Path("log.txt").read_text()) == ("kept", "a line\n")


@pytest.mark.skipif(not can_lock(), reason="needs Landlock of Linux 6.2")
def test_what_goes_around_the_view_is_refused_by_the_system(tmp_path: Path) -> None:
    (tmp_path / "free").mkdir()
    (tmp_path / "kept").write_text("kept")
    pid = os.fork()
    if pid == 0:
        lock_files([str(tmp_path / "free"), "/dev"])
        shell = "echo free > free/x; mv free/x free/y; cat kept; echo broken > kept; rm -f kept; echo > made"
        subprocess.run(["/bin/sh", "-c", shell], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "kept").read_text() == "kept" and not (tmp_path / "made").exists()
    assert (tmp_path / "free" / "y").read_text() == "free\n"
