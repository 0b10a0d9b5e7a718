"""What every rank does to files and trackers happens once: two ranks read what one reads, and leave the files of one.

Of process/once.py and process/rank_files.py.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import glob
import gzip
import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from torch.distributed import checkpoint

import meshwise as mw
from meshwise.process import once, rank_files
from meshwise.process.session import end_sessions
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan

Script = Callable[[], Any]
SCRIPTS: dict[str, dict[str, Script]] = {}
MODULES = {
    "formats": ("pandas", "pyarrow.parquet", "torch.utils.tensorboard", "matplotlib.pyplot", "PIL.Image"),
    "slow": ("datasets", "transformers.models.bert"),
}
FORKS = multiprocessing.get_context("fork")
LATE = 0.03  # seconds by which one of the ranks comes later to each script, by turns
W = torch.arange(20_000.0)


def script(kind: str) -> Callable[[Script], Script]:
    def add(function: Script) -> Script:
        SCRIPTS.setdefault(kind, {})[function.__name__] = function
        return function

    return add


def prepare(folder: Path) -> None:
    for name in ("ck", "outdir", "runs/version_0"):
        (folder / name).mkdir(parents=True)
    texts = {"log.csv": "epoch,loss\n0,9\n", "count.txt": "3", "old.pt": "old", "outdir/a": "a", "src.bin": "s" * 999}
    for name, text in {**texts, **{f"ck/ckpt-{n}.pt": "x" * 9 for n in (1, 2, 3)}}.items():
        (folder / name).write_text(text)
    with contextlib.closing(sqlite3.connect(folder / "have.db")) as base:
        base.executescript("create table t(x); insert into t values(1)")


@script("files")
def save_and_load() -> Any:
    found = []
    for epoch in range(4):
        torch.save({"w": W + epoch}, "best.pt")
        found.append(float(torch.load("best.pt")["w"][5]))
    with open("handle.pt", "wb") as file:
        torch.save(W, file)
    return found, float(torch.load("handle.pt").sum())


@script("files")
def append_rows() -> Any:
    for epoch in (1, 2):
        new = not os.path.exists("m.csv")
        with open("log.csv", "a") as log, open("m.csv", "a", newline="") as table:
            log.write(f"{epoch},{9 - epoch}\n")
            csv.writer(table).writerows([["epoch"]] * new + [[epoch]])
    return open("log.csv").read(), open("m.csv").read()


@script("files")
def texts_and_pickles() -> Any:
    with open("a.json", "w") as file:
        json.dump([1] * 50, file)
    Path("b.txt").write_text("b")
    Path("p.pkl").write_bytes(pickle.dumps([1]))
    with gzip.open("a.gz", "wt") as file:
        file.write("z")
    with zipfile.ZipFile("a.zip", "w") as file:
        file.writestr("n", "q")
    with open("only", "x") as file:
        file.write("1")
    with open("src.bin", "r+b") as file:
        file.seek(3)
        file.write(b"ab")
    return json.load(open("a.json")), gzip.open("a.gz", "rt").read(), open("src.bin").read(6), open("only").read()


@script("files")
def count_and_resume() -> Any:
    for _ in range(2):
        Path("count.txt").write_text(str(int(Path("count.txt").read_text()) + 1))
    start = torch.load("state.pt")["n"] if os.path.exists("state.pt") else 0
    torch.save({"n": start + 1}, "state.pt")
    version = 1 + max(int(name.split("_")[1]) for name in os.listdir("runs"))
    os.makedirs(f"runs/version_{version}")
    return Path("count.txt").read_text(), start, version


@script("files")
def make_and_remove() -> Any:
    os.makedirs("new/sub")
    if not os.path.exists("new2"):
        os.makedirs("new2")
    os.remove("old.pt")
    if os.path.exists("outdir"):
        shutil.rmtree("outdir")
    os.makedirs("outdir")
    Path("outdir/b").write_text("b")
    return os.listdir("new"), os.path.exists("old.pt"), os.listdir("outdir"), [each.name for each in os.scandir("new")]


@script("files")
def rotate() -> Any:
    for epoch in (4, 5, 6):
        old = sorted(glob.glob("ck/ckpt-*.pt"))
        if len(old) >= 3:
            os.remove(old[0])
        torch.save(epoch, f"ck/ckpt-{epoch}.pt")
    return sorted(os.listdir("ck")), torch.load("ck/ckpt-6.pt"), max(glob.glob("ck/*"), key=os.path.getmtime)


@script("files")
def replace_copy_move() -> Any:
    Path("s.tmp").write_text("s")
    os.replace("s.tmp", "s.json")
    for epoch in range(3):
        torch.save(W + epoch, "best.pt")
        shutil.copy("best.pt", "outdir/copy.pt")
        os.replace("best.pt", "final.pt")
        torch.save(epoch, "last.pt")
        shutil.move("last.pt", "moved.pt")
    os.link("final.pt", "linked.pt")
    return (
        float(torch.load("final.pt")[0]),
        float(torch.load("outdir/copy.pt")[0]),
        torch.load("moved.pt"),
        glob.glob("*.pt"),
    )


@script("files")
def names_by_time() -> Any:
    folder = f"out-{time.time_ns()}"
    os.makedirs(folder)
    for epoch in range(3):
        torch.save(epoch, folder + "/best.pt")
        open(folder + "/log", "a").write("x")
    return torch.load(folder + "/best.pt"), sorted(os.listdir(folder)), open(folder + "/log").read()


@script("files")
def temporary() -> Any:
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w+") as file:
        torch.save(1, folder + "/a.pt")
        file.write("x")
        file.flush()
        return torch.load(folder + "/a.pt"), open(file.name).read()


@script("files")
def threads_and_loaders() -> Any:
    class Cached(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, n: int) -> int:
            open("seen.txt", "a").write("x")
            return n

    thread = threading.Thread(target=lambda: open("thread.txt", "a").write("1"))
    thread.start()
    thread.join()
    list(torch.utils.data.DataLoader(Cached(), num_workers=1))
    return open("thread.txt").read(), open("seen.txt").read()


@script("formats")
def tensors_and_arrays() -> Any:
    safetensors.torch.save_file({"w": W}, "m.safetensors")
    safetensors.numpy.save_file({"w": np.arange(9.0)}, "n.safetensors")
    np.save("a.npy", np.arange(9))
    np.savez("b.npz", x=np.arange(3))
    np.arange(9).tofile("d.bin")
    mapped = np.memmap("e.bin", dtype="f4", mode="w+", shape=(5,))
    mapped[:] = 2
    mapped.flush()
    arrays = np.load("a.npy"), np.load("b.npz")["x"], np.fromfile("d.bin", int), np.memmap("e.bin", dtype="f4")
    read = safetensors.torch.load_file("m.safetensors")["w"], safetensors.numpy.load_file("n.safetensors")["w"]
    return [float(each.sum()) for each in (*arrays, *read)]


@script("formats")
def tables() -> Any:
    pandas, parquet = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.parquet")
    frame = pandas.DataFrame({"a": range(100)})
    frame.to_csv("d.csv")
    frame.to_parquet("d.parquet")
    parquet.write_table(parquet.read_table("d.parquet"), "t.parquet")
    rows = parquet.ParquetFile("t.parquet").metadata.num_rows
    return pandas.read_csv("d.csv").to_string(), int(pandas.read_parquet("d.parquet")["a"].sum()), rows


@script("formats")
def hdf5() -> Any:
    h5py = pytest.importorskip("h5py")
    with h5py.File("x.h5", "w") as file:
        file["a"] = np.arange(9)
    with h5py.File("x.h5", "r") as file:
        return int(file["a"][:].sum())


@script("formats")
def logs_and_boards() -> Any:
    boards, log = pytest.importorskip("torch.utils.tensorboard"), logging.getLogger("once")
    for place in ("tb", None):
        with boards.SummaryWriter(place) as board:
            board.add_scalar("loss", 1, 1)
    handler = logging.FileHandler("t.log")
    log.addHandler(handler)
    log.warning("one")
    handler.close()
    log.removeHandler(handler)
    return len(os.listdir("tb")), len(os.listdir("runs")), open("t.log").read()


@script("formats")
def pictures() -> Any:
    plots, images = pytest.importorskip("matplotlib.pyplot"), pytest.importorskip("PIL.Image")
    plots.switch_backend("Agg")
    plots.plot([1, 2])
    plots.savefig("p.png")
    plots.close()
    images.new("RGB", (4, 4)).save("i.png")
    return images.open("p.png").size, images.open("i.png").size


@script("formats")
def bases() -> Any:
    for name in ("have.db", "new.db"):
        with contextlib.closing(sqlite3.connect(name)) as base:
            base.execute("create table if not exists t(x)")
            base.execute("insert into t values(2)")
            base.commit()
            yield base.execute("select count(*) from t").fetchone()


@script("formats")
def downloads() -> Any:
    if not os.path.exists("dl.bin"):
        urllib.request.urlretrieve("file://" + os.path.abspath("src.bin"), "dl.bin")
    return len(open("dl.bin").read())


@script("formats")
def traced_and_sharded() -> Any:
    traced = torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    torch.jit.save(traced, "j.pt")
    traced.save("k.pt")
    checkpoint.state_dict_saver.save({"w": W}, checkpoint_id="dcp", no_dist=True)
    state = {"w": torch.zeros(20_000)}
    checkpoint.state_dict_loader.load(state, checkpoint_id="dcp", no_dist=True)
    return float(state["w"][5]), os.path.getsize("k.pt") > 0, torch.jit.load("j.pt") is None


@script("programs")
def results_are_handed_on() -> Any:
    Path("mine.txt").write_text("mine")
    subprocess.run(["sh", "-c", "cat src.bin >> app.bin; rm old.pt"], check=True)
    found = subprocess.run(["cat", "mine.txt"], capture_output=True).stdout, os.path.getsize("app.bin")
    with pytest.raises(subprocess.CalledProcessError) as error:
        subprocess.run(["sh", "-c", "exit 3"], check=True)
    return (
        found,
        os.path.exists("old.pt"),
        error.value.returncode,
        subprocess.check_output(["echo", "x"]),
        os.system("true"),
    )


@script("programs")
def what_programs_change_is_seen() -> Any:
    torch.save(W, "best.pt")
    Path("b.txt").write_text("b")
    Path("c.txt").write_text("c")
    os.remove("old.pt")
    subprocess.call(["sh", "-c", "gzip -f best.pt; echo more >> b.txt; echo new > old.pt"])
    open("c.txt", "a").write("d")
    torch.save(1, "best.pt")
    return sorted(os.listdir(".")), [open(each).read() for each in ("b.txt", "c.txt", "old.pt")], torch.load("best.pt")


@script("slow")
def libraries() -> Any:
    sets, models = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    models.BertModel(models.BertConfig(vocab_size=30, **sizes)).save_pretrained("hf")
    read = models.BertModel.from_pretrained("hf")
    sets.Dataset.from_dict({"a": [1, 2, 3]}).save_to_disk("ds")
    return float(sum(p.double().sum() for p in read.parameters())), sets.load_from_disk("ds")["a"][:], os.listdir("hf")


def contents(folder: Path) -> dict[str, Any]:
    """Each file by name and contents; by size, what has names or times inside."""
    found = dict[str, Any]()
    for path in sorted(folder.rglob("*")):
        name = re.sub(r"events\.out.*|[A-Z][a-z]{2}\d\d_[^/]+", "E", str(path.relative_to(folder)))
        name, inside = re.sub(r"\d{12,}", "N", name), path.read_bytes() if path.is_file() else b""
        by_size = re.search(r"E$|\.(pt|db|gz|zip|h5|parquet|arrow|metadata)$|state.json|^dcp|npz", name)
        found[name] = len(inside) if by_size else hashlib.md5(inside).hexdigest()
    return found


def forked(case: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """Call `case(rank)` in one forked process for each rank. Return what it returned, or its error."""

    def child(rank: int, pipe: Any) -> None:
        try:
            pipe.send(case(rank))
        except BaseException as error:
            traceback.print_exc()
            pipe.send(error)
        pipe.close()
        os._exit(0)

    pipes, children = [FORKS.Pipe(False) for _ in range(ranks)], []
    for rank, (_, write) in enumerate(pipes):
        children.append(FORKS.Process(target=child, args=(rank, write)))
        children[-1].start()
        write.close()
    found = [read.recv() if read.poll(60) else TimeoutError("it waits for ever") for read, _ in pipes]
    for each in children:
        each.kill()
        each.join()
    return found


def ran(kind: str, folder: Path, late: int | None) -> tuple[list[Any], dict[str, Any]]:
    """Run the scripts by one process, or by two, one of which is `late`. Return their reads, and the files."""
    for module in MODULES.get(kind, ()):  # once, not in each process
        with contextlib.suppress(ImportError):
            import_module(module)
    for name in SCRIPTS[kind]:
        prepare(folder / name)

    def case(rank: int) -> dict[str, Any]:
        found = dict[str, Any]()
        view = once.once(rank, 2, str(folder.parent / f"meshwise-{folder.name}"))
        with contextlib.nullcontext() if late is None else view:
            for number, (name, function) in enumerate(SCRIPTS[kind].items()):
                time.sleep(LATE * ((number + rank) % 2 == late))
                os.chdir(folder / name)
                try:
                    result = function()
                    found[name] = list(result) if isinstance(result, Iterator) else result
                except (Exception, pytest.skip.Exception) as error:
                    found[name] = f"{type(error).__name__}: {error}"
        return found

    Path(folder.parent / f"meshwise-{folder.name}").mkdir()
    return forked(case, 1 if late is None else 2), contents(folder)


@pytest.mark.parametrize("kind", [*list(SCRIPTS)[:-1], pytest.param("slow", marks=pytest.mark.slow)])
def test_two_ranks_read_and_leave_what_one_does(kind: str, tmp_path: Path) -> None:
    (want,), files = ran(kind, tmp_path / "one", None)
    assert not [text for text in want.values() if isinstance(text, str) and "Error" in text]
    for late in (0, 1):
        found, left = ran(kind, tmp_path / f"late{late}", late)
        for rank, each in enumerate(found):
            assert each == want, f"rank {rank}"
        assert left == files


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder that two ranks share. The current folder is the user's."""
    for name in ("meshwise-shared", "user"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "user")
    monkeypatch.setattr(rank_files, "PATIENCE", 0.3)
    return str(tmp_path / "meshwise-shared")


def both(folder: str, script: Callable[[int], Any], seen: bool = True) -> list[Any]:
    """seen: whether rank 1 sees the files of rank 0. Else it is on another machine."""

    def case(rank: int) -> Any:
        own = folder if seen or rank == 0 else tempfile.mkdtemp(prefix="meshwise-")
        if own != folder:
            shutil.copytree(".", "../there")
            os.chdir("../there")
        with once.once(rank, 2, own, shared=seen or rank == 0):
            return script(rank)

    return forked(case)


def test_a_save_that_rank_0_never_makes_is_told_with_both_lines(shared: str) -> None:
    def script(rank: int) -> Any:
        torch.save(1, "a.pt")
        if rank:
            torch.save(2, "b.pt")
            return torch.load("b.pt")
        return None

    error = both(shared, script)[1]
    first = script.__code__.co_firstlineno
    assert isinstance(error, UsageError)
    at = [int(line) for line in re.findall(r"test_once.py:(\d+)", str(error))]
    assert at == [first + 4, first + 1, first + 3], error


@pytest.mark.parametrize("disk", ["without links", "not shared"])
def test_a_disk_without_links_or_of_another_machine_means_private_copies(
    disk: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*given: Any, **named: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    def script(rank: int) -> Any:
        os.remove("old")
        for epoch in range(3):
            torch.save(W + epoch, "a.pt")
            open("log", "a").write(str(epoch))
        return float(torch.load("a.pt")[0]), open("log").read(), subprocess.run(["true"]).returncode

    Path("old").touch()
    if disk == "without links":
        monkeypatch.setattr(os, "link", no_link)
    assert both(shared, script, disk != "not shared") == [(2.0, "012", 0)] * 2
    assert Path("log").read_text() == "012" and float(torch.load("a.pt")[0]) == 2.0 and not Path("old").exists()


def test_files_of_meshwise_and_files_after_a_meeting_are_those_of_rank_0(shared: str) -> None:
    def script(rank: int) -> Any:
        once.free("states")
        if rank == 0:
            Path("guarded").write_text("by rank 0")
        Path("states").mkdir(exist_ok=True)
        Path(f"states/{rank}").touch()
        before = os.path.exists("guarded")
        with once.meeting():
            Path(f"{shared}/came{rank}").touch()
            while not os.path.exists(f"{shared}/came{1 - rank}"):
                time.sleep(0.01)
        return before, Path("guarded").read_text(), sorted(os.listdir("states"))

    states = ["0", "1"]
    assert both(shared, script) == [(True, "by rank 0", states), (False, "by rank 0", states)]


def test_programs_and_loader_workers_that_act_on_every_rank_are_told_on_rank_0(
    shared: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def script(rank: int) -> Any:
        told = list[str]()
        monkeypatch.setattr(rank_files, "tell", told.append)
        subprocess.Popen(["true"]).wait()
        SCRIPTS["files"]["threads_and_loaders"]()
        return told

    first, second = both(shared, script)
    line = script.__code__.co_firstlineno + 3
    assert first == [rank_files.STARTS.format(here=f"{__file__}:{line}")] and not second
    assert capfd.readouterr().err.count("a loader's worker writes") == 1


def test_a_librarys_own_programs_run_on_every_rank(shared: str) -> None:
    library = compile(
        "import subprocess\ndef version(): return subprocess.run(['true']).returncode", "<library>", "exec"
    )
    names: dict[str, Any] = {}
    exec(library, names)
    assert both(shared, lambda rank: names["version"]() if rank else None) == [None, 0]


def test_wandb_records_on_rank_0_alone(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**given: Any) -> Any:
        return SimpleNamespace(dir=f"{given['dir']}/run", given=given)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, run=None))

    def script(rank: int) -> Any:
        run = sys.modules["wandb"].init(dir="logs", mode="online")
        return run.given, os.path.isdir("logs/run"), os.environ.get("WANDB_MODE")

    given = {"dir": "logs", "mode": "online"}
    assert both(shared, script) == [(given, False, None), ({**given, "mode": "disabled"}, True, "disabled")]


def saved_under(plan: Plan | None, folder: str, turns: int) -> Any:
    """Train, save all states and a part of them, and go on from the file. Return the weights."""
    end_sessions()
    os.chdir(folder)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    x = torch.randn(16, 6, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, plan=plan)
    end = once.begin(mw.rank(), turns) if turns > 1 else lambda: None
    for x, y in loader:
        mw.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": 1}, "states.pt")
        states = torch.load("states.pt")
        model.load_state_dict({name: value + 0.5 for name, value in states["model"].items()})
        optimizer.load_state_dict(states["optimizer"])
    safetensors.torch.save_file(model.state_dict(), "m.safetensors")
    whole = {name: value.tolist() for name, value in safetensors.torch.load_file("m.safetensors").items()}
    end()
    end_sessions()
    return whole


def test_a_sharded_state_is_saved_whole_and_read_back(tmp_path: Path, pool: Any) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    want = saved_under(None, str(tmp_path / "one"), 1)
    got = pool(2).run(saved_under, Plan(shard=2), str(tmp_path / "two"), 2)
    for each in got:
        assert each.keys() == want.keys()
        assert all(np.allclose(each[name], value, rtol=0, atol=1e-12) for name, value in want.items())
    one, two = (torch.load(tmp_path / name / "states.pt") for name in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
    assert sorted(os.listdir(tmp_path / "two")) == ["m.safetensors", "states.pt"]
