"""What every rank does to files happens once: two ranks read what one reads, and leave the files of one."""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.distributed import checkpoint

import meshwise as mw
from meshwise.spec.plan import Plan
from meshwise.training.process import once, rank_files
from meshwise.training.process.session import end_sessions

pytestmark = pytest.mark.filterwarnings("ignore")
FORKS = multiprocessing.get_context("fork")
W, SET = torch.arange(20_000.0), torch.utils.data.TensorDataset(torch.arange(2))


def text(path: str, mode: str = "r", write: str = "") -> Any:
    with open(path, mode) as file:
        return file.write(write) if mode != "r" else file.read()


def saved_files() -> Any:
    found = []
    for epoch in range(4):
        torch.save({"w": W + epoch}, "best.pt")
        found.append(float(torch.load("best.pt")["w"][5]))
        torch.save(W + epoch, "tmp.pt")
        os.replace("tmp.pt", "final.pt")
        shutil.copy("final.pt", "outdir/copy.pt")
        torch.save(W + epoch, "last.pt")
        shutil.move("last.pt", "moved.pt")
    os.link("final.pt", "linked.pt")
    return (
        found,
        [float(torch.load(name).sum()) for name in ("outdir/copy.pt", "moved.pt", "linked.pt")],
        glob.glob("*"),
    )


def written_files() -> Any:
    for epoch in (1, 2):
        text("m.csv", "a", ("" if os.path.exists("m.csv") else "epoch\n") + str(epoch))
        text("log.csv", "a", f"{epoch},{9 - epoch}\n")
        text("count.txt", "w", str(int(text("count.txt")) + 1))
    text("only", "x", "1")
    text("src.bin", "r+", "ab")
    os.write(os.open("by hand", os.O_WRONLY | os.O_CREAT), b"x")
    list(torch.utils.data.DataLoader(SET, collate_fn=lambda batch: text("seen.txt", "a", "x"), num_workers=1))
    return [text(name) for name in ("m.csv", "log.csv", "count.txt", "only", "src.bin", "by hand", "seen.txt")]


def folders() -> Any:
    own = f"out-{time.time_ns()}"
    os.remove("old.pt")
    shutil.rmtree("outdir")
    for folder in (f"runs/version_{len(os.listdir('runs'))}", "new/sub", "outdir", own):
        os.makedirs(folder)
    for epoch in (4, 5, 6):
        os.remove(min(glob.glob("ck/ckpt-*.pt")))
        torch.save(epoch, f"ck/ckpt-{epoch}.pt")
        torch.save(epoch, own + "/best.pt")
        text(own + "/log", "a", "x")
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w+") as file:
        torch.save(1, folder + "/a.pt")
        found = torch.load(folder + "/a.pt"), text(file.name), torch.load(own + "/best.pt"), text(own + "/log")
    lists = [sorted(os.listdir(folder)) for folder in (own, "runs", "new", "outdir", "ck")]
    return found, lists, os.path.exists("old.pt"), [each.name for each in os.scandir("new")]


def arrays_and_bases() -> Any:
    safetensors.torch.save_file({"w": W}, "m.safetensors")
    np.savez("b.npz", x=np.arange(3))
    np.memmap("e.bin", dtype="f4", mode="w+", shape=(5,))[:] = 2
    state = {"w": torch.zeros(20_000)}
    checkpoint.state_dict_saver.save({"w": W}, checkpoint_id="dcp", no_dist=True)
    checkpoint.state_dict_loader.load(state, checkpoint_id="dcp", no_dist=True)
    with contextlib.closing(sqlite3.connect("new.db")) as base:
        base.executescript("create table if not exists t(x); insert into t values(2)")
        counts = base.execute("select count(*) from t").fetchone()
    read = safetensors.torch.load_file("m.safetensors")["w"], np.load("b.npz")["x"], np.memmap("e.bin", dtype="f4")
    return [float(each.sum()) for each in (*read, state["w"])], counts


def programs() -> Any:
    text("mine.txt", "w", "mine")
    torch.save(W, "best.pt")
    subprocess.run("cat src.bin >> app.bin; rm old.pt; gzip -nf best.pt; echo more >> mine.txt", shell=True, check=True)
    found: Any = subprocess.run(["cat", "mine.txt"], capture_output=True).stdout, os.path.getsize("app.bin")
    with pytest.raises(subprocess.CalledProcessError) as error:
        subprocess.run("exit 3", shell=True, check=True)
    text("mine.txt", "a", "d")
    torch.save(1, "best.pt")
    found += error.value.returncode, subprocess.check_output(["echo", "x"]), os.system("true")
    return found, sorted(os.listdir(".")), text("mine.txt"), torch.load("best.pt")


def tables() -> Any:
    pandas, parquet = map(pytest.importorskip, ("pandas", "pyarrow.parquet"))
    pandas.DataFrame({"a": [1, 2]}).to_parquet("d.parquet")
    parquet.write_table(parquet.read_table("d.parquet"), "t.parquet")
    return parquet.ParquetFile("t.parquet").metadata.num_rows, int(pandas.read_parquet("d.parquet")["a"].sum())


def contents(folder: str) -> dict[str, Any]:
    """Each file by name and contents; by size, what has names or times inside."""
    found, sized = dict[str, Any](), (".pt", ".db", ".npz", ".parquet", ".metadata", ".distcp")
    for path in Path(folder).rglob("*"):
        inside = path.read_bytes() if path.is_file() else b""
        found[re.sub(r"\d{12,}", "N", str(path))] = len(inside) if path.name.endswith(sized) else inside
    return found


def forked(case: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """Call `case(rank)` in one forked process for each rank. Return what it returned, or its error."""

    def child(rank: int) -> None:
        try:
            pipes[rank][1].send(case(rank))
        except Exception as error:
            pipes[rank][1].send(error)

    pipes = [FORKS.Pipe(False) for _ in range(ranks)]
    children = [FORKS.Process(target=child, args=(rank,)) for rank in range(ranks)]
    for each in children:
        each.start()
    return [read.recv() if read.poll(60) else [*map(FORKS.Process.kill, children)] for read, _ in pipes]


def both(folder: str, script: Callable[[int], Any], seen: bool = True) -> list[Any]:
    """seen: whether rank 1 sees the files of rank 0. Else it is on another machine."""

    def case(rank: int) -> Any:
        own = folder if seen or rank == 0 else tempfile.mkdtemp(prefix="meshwise-")
        if own != folder:
            os.chdir(shutil.copytree(".", "../there"))
        with once.once(rank, 2, own, shared=seen or rank == 0):
            return script(rank)

    return forked(case)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder that two ranks share. The current folder is the user's."""
    for name in ("meshwise-shared", "user/ck", "user/outdir", "user/runs/version_0"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "user")
    for name in ("log.csv", "count.txt", "old.pt", "outdir/a", "src.bin", *(f"ck/ckpt-{n}.pt" for n in (1, 2, 3))):
        text(name, "w", "333")
    return str(tmp_path / "meshwise-shared")


DENSE = pytest.param(arrays_and_bases, marks=pytest.mark.slow)  # torch's threads hung in a forked child, once in ten


@pytest.mark.parametrize("script", [saved_files, written_files, folders, DENSE, programs, tables])
def test_two_ranks_read_and_leave_what_one_does(script: Callable[[], Any], shared: str) -> None:
    start, late = os.getcwd(), None

    def case(rank: int) -> Any:
        time.sleep(0.03 * (rank == late))
        return script()

    for late in (0, 1):
        shutil.copytree(start, f"{start}{late}")
        Path(f"{shared}{late}").mkdir()
    (want,), files = forked(case, 1), contents(".")
    assert not isinstance(want, Exception)
    for late in (0, 1):
        os.chdir(f"{start}{late}")
        assert (both(f"{shared}{late}", case), contents(".")) == ([want, want], files)


def test_a_save_that_rank_0_never_makes_is_told_with_both_lines(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(rank: int) -> Any:
        torch.save(1, "a.pt")
        if rank:
            torch.save(2, "b.pt")
            torch.load("b.pt")

    monkeypatch.setattr(rank_files, "PATIENCE", 1.0)
    error, first = both(shared, script)[1], script.__code__.co_firstlineno
    assert [int(line) - first for line in re.findall(r"test_once.py:(\d+)", str(error))] == [4, 1, 3], error


@pytest.mark.parametrize("disk", ["without links", "not shared"])
def test_disks_mean_private_copies(disk: str, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(rank: int) -> Any:
        os.remove("old.pt")
        for epoch in range(3):
            torch.save(W + epoch, "a.pt")
            text("log", "a", str(epoch))
        return float(torch.load("a.pt")[0]), text("log"), subprocess.run(["true"]).returncode

    if disk == "without links":
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError))
    assert both(shared, script, disk != "not shared") == [(2.0, "012", 0)] * 2
    assert text("log") == "012" and float(torch.load("a.pt")[0]) == 2.0 and not Path("old.pt").exists()


def test_files_of_meshwise_and_files_after_a_meeting_are_those_of_rank_0(shared: str) -> None:
    def script(rank: int) -> Any:
        once.free("states")
        if rank == 0:
            text("guarded", "w", "by rank 0")
        text("log.csv", "a", f"rank {rank}")
        Path("states").mkdir(exist_ok=True)
        Path(f"states/{rank}").touch()
        before = os.path.exists("guarded")
        with once.meeting():
            gate.wait()
        return before, text("guarded"), text("log.csv")[-6:], sorted(os.listdir("states"))

    gate = FORKS.Barrier(2)
    assert both(shared, script) == [(rank == 0, "by rank 0", "rank 0", ["0", "1"]) for rank in (0, 1)]


def test_what_acts_on_every_rank_is_told(shared: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def script(rank: int) -> Any:
        told = list[str]()
        monkeypatch.setattr(rank_files, "tell", told.append)
        subprocess.Popen(["true"]).wait()
        written_files()
        return names["version"]() if rank else told

    names: dict[str, Any] = {}
    exec(compile("import subprocess\ndef version(): return subprocess.run(['true']).args", "<lib>", "exec"), names)
    told = [rank_files.STARTS.format(here=f"{__file__}:{script.__code__.co_firstlineno + 3}")]
    assert both(shared, script) == [told, ["true"]], "a library's own program runs on every rank"
    assert capfd.readouterr().err.count("a loader's worker writes") == 1


def test_wandb_records_on_rank_0_alone(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    init = lambda **given: SimpleNamespace(dir="logs/run", given=given)  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, run=None))

    def script(rank: int) -> Any:
        return sys.modules["wandb"].init(mode="online").given["mode"], os.path.isdir("logs/run")

    assert both(shared, script) == [("online", False), ("disabled", True)]


def saved_under(plan: Plan | None, folder: str) -> Any:
    """Train, save all states and a part of them, and go on from the file. Return the weights."""
    end_sessions()
    os.chdir(folder)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 1)).double()
    loader: Any = torch.utils.data.DataLoader(torch.randn(16, 6).double(), batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = mw.distribute(
        model, torch.optim.AdamW(model.parameters()), loader, plan=plan, view="rank"
    )
    end = once.begin(mw.rank(), mw.world_size())
    for x in loader:
        mw.backward(model(x).square().mean())
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": 1}, "states.pt")
        states = torch.load("states.pt")
        model.load_state_dict({name: value + 0.5 for name, value in states["model"].items()})
        optimizer.load_state_dict(states["optimizer"])
    safetensors.torch.save_file(model.state_dict(), "m.safetensors")
    end()
    end_sessions()
    return states


def test_a_sharded_state_is_saved_whole_and_read_back(tmp_path: Path, pool: Any) -> None:
    one, two = (Path(tempfile.mkdtemp(dir=tmp_path)) for _ in range(2))
    want = saved_under(None, str(one))
    for got in (*pool(2).run(saved_under, Plan(shard=2), str(two)), torch.load(two / "states.pt")):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    files = [safetensors.torch.load_file(folder / "m.safetensors") for folder in (one, two)]
    torch.testing.assert_close(*files, rtol=0, atol=1e-12)
    assert sorted(os.listdir(two)) == ["m.safetensors", "states.pt"]
