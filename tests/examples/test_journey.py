"""The stations of examples/journey at small sizes; the whole way, with its figures, among the slow tests."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import rich.progress
import torch

from meshwise.training.jobs.mnist import MNIST, read_images

FOLDER = Path(__file__).parents[2] / "examples" / "journey"
STATIONS = ("download", "clean", "design", "implement", "train", "watch", "evaluate", "optimise")
CONTENT = bytes(np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8))
SHA256 = hashlib.sha256(CONTENT).hexdigest()

Module = Callable[[str], ModuleType]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Imports a file of the journey, as its neighbours do, in a folder of its own."""
    names = {file.stem for file in FOLDER.glob("*.py")}
    for name in names:  # other tests have a train.py of their own
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def test_a_station_has_at_most_60_lines() -> None:
    assert all(len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60 for name in STATIONS)


# Station 1


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Serves CONTENT; by the name of the folder it breaks off, is wrong, knows no ranges. `asked`: from which byte."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            where, start = self.path.split("/")[1], int((self.headers["Range"] or "bytes=0-")[6:-1])
            self.server.asked.append(start)  # type: ignore[attr-defined]
            if where == "absent":
                return self.send_error(404)
            if start >= len(CONTENT):
                return self.send_error(416)
            start = 0 if where == "whole" else start
            content = bytes(CONTENT if where != "wrong" else b"x" + CONTENT[1:])[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:100_000] if where in ("breaks", "whole") and len(content) > 100_000 else content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("where", "had", "is_right", "asked"),
    [
        ("good", b"", True, [0]),
        ("breaks", b"", True, [0, 100_000, 200_000]),
        ("good", CONTENT[:1234], True, [1234]),
        ("good", CONTENT, True, []),  # ended between the last byte and the new name
        ("good", b"y" * 1234, True, [1234, 0]),  # what is complete and wrong is thrown away
        ("wrong", b"", False, [0]),
        ("absent", b"", False, [0]),
        ("whole", b"", False, [0, 100_000]),  # knows no ranges, and breaks off
    ],
)
def test_a_download_goes_on_and_is_used_only_if_it_is_right(
    where: str, had: bytes, is_right: bool, asked: list[int], module: Module, tmp_path: Path, server: Any
) -> None:
    path = tmp_path / "file.gz"
    path.with_name("file.gz.part").write_bytes(had)
    with rich.progress.Progress(disable=True) as bar:
        url = f"http://127.0.0.1:{server.server_port}/{where}/file.gz"
        assert module("fetch").download(url, SHA256, path, bar) == is_right
    assert path.exists() == is_right
    if is_right:
        assert path.read_bytes() == CONTENT
    assert server.asked == asked


def test_a_part_is_kept_for_the_next_time_where_nobody_answers(module: Module, tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    path.with_name("file.gz.part").write_bytes(CONTENT[:1234])
    with rich.progress.Progress(disable=True) as bar:
        assert not module("fetch").download("http://127.0.0.1:9/file.gz", SHA256, path, bar)
    assert path.with_name("file.gz.part").read_bytes() == CONTENT[:1234]


@pytest.mark.usefixtures("processes")
def test_without_any_mirror_the_digits_are_those_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # where nobody answers
    (tmp_path / "list.txt").write_text(f"{SHA256}  http://127.0.0.1:9/train-images-idx3-ubyte.gz\n\n")
    words = [sys.executable, str(FOLDER / "download.py"), "list.txt"]
    refused = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert refused.returncode == 1 and "Not every file of list.txt" in refused.stderr
    told = typed("download.py", folder=tmp_path)
    assert "training images: 60,000" in told
    assert (
        "the MNIST that meshwise ships"
        in json.loads((tmp_path / "journey" / "rows" / "download.json").read_text())["done"]
    )
    assert len(read_images(tmp_path / "journey" / "download", "test")) == len(read_images(MNIST, "test"))


# Station 2


def damaged(module: Module, images: int) -> list[dict[str, str]]:
    """A damaged copy of so many digits, and what was planted."""
    module("station")  # makes the folder
    Path("journey/download").symlink_to(MNIST)
    rows = list(module("damage").plant(images, np.random.default_rng(1)))
    return [{"file": str(file), "fault": fault, "copy of": str(of)} for file, fault, of in rows]


def test_each_cut_of_a_file_is_found(module: Module, tmp_path: Path) -> None:
    damaged(module, 10)
    whole = next((tmp_path / "journey/copy/test").glob("*/*.png"))
    content = whole.read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut" / "7").mkdir(parents=True, exist_ok=True)
        (tmp_path / "cut" / "7" / f"{length:04}.png").write_bytes(content[:length])
    (tmp_path / "cut" / "7" / "whole.png").write_bytes(content)
    images, labels, files, broken = module("find").read(tmp_path / "cut")
    assert [file.name for file in files] == ["whole.png"]
    assert len(broken) == len(content) and labels.tolist() == [7] and images.shape == (1, 28, 28)


def test_all_broken_files_all_exact_and_most_near_duplicates_are_found(module: Module) -> None:
    planted, find = damaged(module, 500), module("find")
    test, _, test_files, _ = find.read(Path("journey/copy/test"))
    images, _, files, broken = find.read(Path("journey/copy/train"))
    assert {str(file) for file in broken} == {row["file"] for row in planted if row["fault"] == "broken"}
    names, pixels = [*test_files, *files], torch.cat([test, images])
    cosines, twins = find.most_alike(pixels)
    pairs = [(names[i], names[t]) for i, (c, t) in enumerate(zip(cosines, twins, strict=True)) if c > 0.985]
    found = {frozenset(map(str, pair)) for pair in pairs}
    copies = {row["fault"]: [r for r in planted if r["fault"] == row["fault"]] for row in planted if row["copy of"]}
    hits = {fault: [frozenset((r["file"], r["copy of"])) in found for r in rows] for fault, rows in copies.items()}
    assert hits["exact duplicate"] and all(hits["exact duplicate"])
    assert np.mean(hits["near duplicate"]) > 0.8
    assert len(found) <= sum(map(len, copies.values()))


def test_a_label_is_in_doubt_where_another_class_is_more_likely_by_half(module: Module) -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.7, 0.3]])
    assert module("find").likely_labels(probabilities, torch.tensor([0, 1, 1])).tolist() == [-1, 0, -1]


def test_the_score_counts_a_pair_once_whichever_of_it_went(module: Module) -> None:
    planted = [
        {"file": "a", "fault": "near duplicate", "copy of": "b"},
        {"file": "c", "fault": "near duplicate", "copy of": "d"},
        {"file": "e", "fault": "wrong label", "copy of": ""},
    ]
    removed = [
        {"file": "b", "fault": "near duplicate"},
        {"file": "x", "fault": "wrong label"},
        {"file": "e", "fault": "wrong label"},
    ]
    assert module("damage").score(planted, removed) == [("near duplicate", 2, 1, 0), ("wrong label", 1, 1, 1)]


# Stations 3 to 8


@pytest.fixture
def cleaned(tmp_path: Path) -> Path:
    """A folder with what stations 2 and 3 leave to the others: few digits, a small design."""
    (tmp_path / "journey" / "clean").mkdir(parents=True)
    (tmp_path / "journey" / ".made-by-meshwise").touch()
    for part, count in ("train", 300), ("test", 200):
        digits = read_images(MNIST, part)
        torch.save((digits.pixels[:count], digits.labels[:count]), tmp_path / "journey" / "clean" / f"{part}.pt")
    (tmp_path / "journey" / "design.json").write_text('{"width": 4, "epochs": 3, "milliseconds": [1.0, 2.0]}')
    return tmp_path


def typed(script: str, *words: str, folder: Path, run: bool = False) -> str:
    """What a station prints. run: on two CPU workers, by `meshwise run`."""
    command = ["-m", "meshwise", "run", "--devices", "2xcpu", "--out", "journey/runs"] if run else []
    result = subprocess.run(
        [sys.executable, *command, str(FOLDER / script), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def row(folder: Path, station: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "journey" / "rows" / f"{station}.json").read_text())
    assert content["done"] and content["pictures"]
    return content


@pytest.mark.parametrize("station", ["clean", "design", "implement", "train", "evaluate", "optimise"])
def test_a_station_says_what_it_needs(station: str, module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{station}.py"])
    with pytest.raises(SystemExit, match=r"^journey/\S+ is missing. Run first: python examples/journey/\w+\.py$"):
        runpy.run_path(str(FOLDER / f"{station}.py"), run_name="__main__")


@pytest.mark.usefixtures("processes")
def test_the_loop_gives_the_same_on_one_and_two_devices_and_shows_its_lines(cleaned: Path) -> None:
    one, two = (typed("implement.py", folder=cleaned, run=run).splitlines()[-1] for run in (False, True))
    assert one == two and one.startswith("test accuracy, width 8, one epoch: ")
    (picture,) = row(cleaned, "implement")["pictures"]
    assert "<ins>    model, optimizer, loader = mw.distribute(model, optimizer, loader)</ins>" in picture


@pytest.mark.usefixtures("processes")
def test_a_training_that_was_stopped_goes_on_and_is_evaluated(cleaned: Path) -> None:
    """Stopped by Ctrl-C after its first epoch: the losses are those of a training that was never stopped."""
    typed("train.py", folder=cleaned, run=True)
    kept = torch.load(cleaned / "journey" / "model.pt")["weights"]
    next((cleaned / "journey").glob("state-4-3-*")).rename(cleaned / "never stopped")
    stop_after(cleaned, "epoch 1/3")
    told = typed("train.py", folder=cleaned, run=True)
    torch.testing.assert_close(torch.load(cleaned / "journey" / "model.pt")["weights"], kept, rtol=0, atol=0)
    assert re.search(r"resumed after step: [3-8]\n", told)
    shown = typed("evaluate.py", folder=cleaned, run=True)
    assert row(cleaned, "train")["figures"]["test accuracy"] in shown and " of 200 images\n" in shown
    assert len(row(cleaned, "evaluate")["pictures"]) == 2


def stop_after(folder: Path, line: str) -> None:
    """Run station 5 on two CPU workers, and stop it by Ctrl-C when it prints this line."""
    command = [sys.executable, "-um", "meshwise", "run", "--devices", "2xcpu", "--out", "journey/runs"]
    with subprocess.Popen([*command, str(FOLDER / "train.py")], cwd=folder, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for printed in run.stdout:
            if printed.startswith(line):
                run.send_signal(signal.SIGINT)
    assert run.returncode == 130


def killed_once(trial: Any) -> float:
    """An objective of one number that kills its process in trial 2."""
    number: float = trial.suggest_float("x", -1, 1)
    time.sleep(0.3)
    if trial.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return -number * number


@pytest.mark.usefixtures("processes")
def test_a_device_that_fails_loses_its_trial_alone_and_a_search_goes_on(
    module: Module, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    search = module("search")
    monkeypatch.setattr(search, "devices", lambda: ["1xcpu", "1xcpu"])
    study = search.search(killed_once, 12, "journal")
    assert "was killed by SIGKILL" in capfd.readouterr().out
    states = [trial.state.name for trial in study.trials]
    assert states.count("FAIL") == 1 and states[2] == "FAIL" and states.count("COMPLETE") in (12, 13)
    (lost,) = (trial for trial in study.trials if trial.state.name == "FAIL")
    assert sum(trial.params == lost.params for trial in study.trials) == 2  # tried again
    assert {trial.user_attrs["place"] for trial in study.trials} == {0, 1}
    again = search.search(killed_once, len(states) + 1, "journal")
    assert len(again.trials) > len(states) and again.trials[0].params == study.trials[0].params


@pytest.mark.usefixtures("takes_seconds")
def test_a_network_in_8_bits_is_a_quarter_as_large_and_as_right(module: Module, cleaned: Path) -> None:
    implement, smaller = module("implement"), module("smaller")
    train, test = (implement.dataset(*torch.load(cleaned / f"journey/clean/{part}.pt")) for part in ("train", "test"))
    implement.fit(model := implement.network(8), train, 8)
    models = {"whole": model, "in 8 bits": smaller.in_8_bits(model, train.tensors[0])}
    (_, before, large, _), (_, after, small, _) = smaller.compared(models, test, turns=1)
    assert small < large / 2.5 and abs(after - before) < 0.02 and before > 0.5


# The slow ones


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_the_widths_are_planned_here_and_elsewhere(cleaned: Path) -> None:
    told = typed("design.py", folder=cleaned)
    assert len(re.findall(r"(?:here|8xH100), width (?:8|16|32): [\d.]+ ms \([\d.]+ to [\d.]+\), [\d,]+ MiB", told)) == 6
    assert json.loads((cleaned / "journey" / "design.json").read_text())["width"] in (8, 16, 32)


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_the_late_rank_is_named_in_the_page_of_the_report(cleaned: Path) -> None:
    digits = read_images(MNIST, "train")
    torch.save((digits.pixels[:3000], digits.labels[:3000]), cleaned / "journey" / "clean" / "train.pt")
    assert "Rank 1 is a straggler in forward" in typed("watch.py", folder=cleaned)
    link = re.search(r'href="([^"]+)"', row(cleaned, "watch")["pictures"][1])
    assert link and (cleaned / "journey" / link[1]).stat().st_size > 100_000


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_search_a_student_and_8_bits_at_a_small_size(cleaned: Path) -> None:
    typed("train.py", folder=cleaned)
    told = typed("optimise.py", "2", folder=cleaned)
    models = re.findall(r"^(\w+(?: bits)?): [\d.]+%, \d+ KiB, [\d.]+ ms per 100 images$", told, re.MULTILINE)
    assert models == ["trained", "searched", "student", "8 bits"]


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_the_whole_way_and_what_its_figures_must_be(tmp_path: Path) -> None:
    told = typed("journey.py", folder=tmp_path)
    assert "equal: Plan(data=2) computes what one device computes" in told
    assert "stopped by Ctrl-C after step" in told and re.search(r"resumed after step: \d", told)
    planted = list(csv.DictReader((tmp_path / "journey" / "planted.csv").read_text().splitlines()))
    found = {fault: (int(of), int(hits), int(wrong)) for fault, hits, of, wrong in re.findall(
        r"^(\w[\w ]+): (\d+) of (\d+) found, (\d+) false alarms", told, re.MULTILINE
    )}  # fmt: skip
    assert {fault: of for fault, (of, *_) in found.items()} == {
        fault: sum(row["fault"] == fault for row in planted) for fault in {row["fault"] for row in planted}
    }
    for fault in ("broken", "exact duplicate"):
        assert found[fault][0] == found[fault][1]
    of, hits, wrong = found["wrong label"]
    assert hits >= 0.9 * of and hits >= 0.8 * (hits + wrong)
    sizes = {name: (float(share), float(kib)) for name, share, kib in re.findall(
        r"^(searched|student|8 bits): ([\d.]+)%, (\d+) KiB", told, re.MULTILINE
    )}  # fmt: skip
    assert sizes["8 bits"][1] <= sizes["searched"][1] / 2
    assert sizes["8 bits"][0] >= sizes["searched"][0] - 0.3
    page = (tmp_path / "journey" / "journey.html").read_text()
    assert page.count('<section class="card row"') == 9 and "https://" not in re.sub(
        r"<(pre|svg).*?</\1>", "", page, flags=re.S
    )
    aside = sum(file.is_file() for file in (tmp_path / "journey" / "aside").rglob("*"))
    assert aside == len((tmp_path / "journey" / "removed.csv").read_text().splitlines()) - 1


@pytest.mark.usefixtures("processes")
def test_a_journey_overwrites_no_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "journey").mkdir()
    (tmp_path / "journey" / "mine.txt").write_text("mine")
    result = subprocess.run(
        [sys.executable, str(FOLDER / "journey.py")], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 1 and "is somebody else's" in result.stderr
    assert (tmp_path / "journey" / "mine.txt").read_text() == "mine"
