"""Ranks that part are told at the first verb that is not the same, with the user's lines (workers/verb_log.py)."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshwise as mw
from meshwise.spec.user_code import place
from meshwise.training.script import distributed_loader
from meshwise.workers import verb_log
from meshwise.workers.divergence import GRACE, DivergenceWatch, divergence, last_verbs, tell_of_loss, trail_path
from meshwise.workers.verb_log import SLOTS, VerbLog, VerbTrail, read_trail

verbs = st.lists(st.sampled_from(["mw.backward", "mw.sum", "optimizer.step"]), max_size=8)


def trail(folder: Path, rank: int, called: Sequence[str]) -> VerbTrail | None:
    log = VerbLog(trail_path(folder, rank))
    for verb in called:
        verb_log.log_verb(verb, log=log)
    return read_trail(trail_path(folder, rank))


@given(verbs, verbs)
def test_ranks_have_diverged_where_one_calls_another_verb(
    tmp_path_factory: pytest.TempPathFactory, a: list[str], b: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("verbs")
    trails = {0: trail(folder, 0, a), 1: trail(folder, 1, b)}
    common = min(len(a), len(b))
    assert bool(divergence(trails, [])) is (a[:common] != b[:common])
    assert bool(divergence(trails, [0, 1])) is (a != b)
    assert bool(divergence(trails, [0])) is (a[:common] != b[:common] or len(b) > len(a))


def test_the_sentence_names_the_first_verb_that_differs_on_each_rank(tmp_path: Path) -> None:
    same = ["mw.backward", "optimizer.step"] * 3
    trails = {
        rank: trail(tmp_path, rank, same + more) for rank, more in enumerate([["mw.sum"], ["mw.load"], ["mw.load"]])
    }
    here = place(__file__, trail.__code__.co_firstlineno + 3)
    text = divergence(trails, [])
    assert text.startswith(f"Ranks diverged: rank 0 reached mw.sum at {here}; ranks 1, 2 reached mw.load at {here}.")
    assert "Look for code that depends on the rank" in text


def test_a_rank_that_ended_and_one_that_is_behind_are_told(tmp_path: Path) -> None:
    trails = {0: trail(tmp_path, 0, ["mw.sum"]), 1: trail(tmp_path, 1, ["mw.sum", "mw.sum"]), 2: None}
    text = divergence(trails, [0, 2])
    assert "ranks 0, 1 reached mw.sum" in text and "; rank 2 ended." in text
    text = divergence({0: trails[0], 1: trails[1]}, [0])
    assert "rank 0 ended; rank 1 reached mw.sum" in text and "(call 2)" in text


def test_what_was_called_last_is_known_where_ranks_have_not_diverged(tmp_path: Path) -> None:
    trails = {0: trail(tmp_path, 0, ["mw.sum"]), 1: trail(tmp_path, 1, ["mw.sum", "mw.backward"])}
    assert divergence(trails, []) == ""
    assert "rank 0: mw.sum at " in last_verbs(trails) and "rank 1: mw.backward at " in last_verbs(trails)
    assert last_verbs({0: None, 1: None}) == ""


def test_under_torchrun_who_loses_the_connection_tells_how_ranks_have_diverged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, shown = RuntimeError("gloo: Connection closed by peer"), []
    tell = functools.partial(tell_of_loss, lambda *error: shown.append(error[1]), tmp_path, range(2))
    for rank, called in enumerate([["mw.backward", "mw.sum"], ["mw.backward", "mw.backward"]]):
        trail(tmp_path, rank, called)
    tell(RuntimeError, lost, None)
    assert "Ranks diverged: rank 0 reached mw.sum at" in capsys.readouterr().err
    tell(ValueError, ValueError("the user's own"), None)
    assert shown[0] is lost and len(shown) == 2 and capsys.readouterr().err == ""
    trail(tmp_path, 0, ["mw.backward"])
    tell(RuntimeError, lost, None)
    assert "The last call: rank 0: mw.backward at" in capsys.readouterr().err
    (tmp_path / "ended-0").touch()
    tell(RuntimeError, lost, None)
    assert "Ranks diverged: rank 0 ended; rank 1 reached mw.backward at" in capsys.readouterr().err


LEAVES = """
import torch
import meshwise as mw
model, loader = mw.distribute(
    torch.nn.Linear(2, 1), torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=4), view="rank"
)
for number, x in enumerate(loader):
    if mw.rank() == 0 and number == 1:
        break
    mw.backward(model(x).mean())
"""


@pytest.mark.slow
def test_torchrun_ends_with_the_lines_of_ranks_that_diverged(tmp_path: Path, processes: None) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "leaves.py"]
    done = subprocess.run(
        torchrun, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=300
    )
    assert done.returncode == 1
    assert "rank 0 left its loop at leaves.py:9 after 2 batches and ended; rank 1 reached" in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("meshwise-verbs-")]


def test_ranks_that_are_further_apart_than_what_is_kept_are_compared_when_they_meet(tmp_path: Path) -> None:
    ahead, behind = VerbLog(trail_path(tmp_path, 0)), VerbLog(trail_path(tmp_path, 1))
    watch = DivergenceWatch(tmp_path, [0, 1])
    for _ in range(2 * SLOTS):
        verb_log.log_verb("mw.sum", log=ahead)
    verb_log.log_verb("mw.sum", log=behind)
    assert divergence(watch.trails(), []) == ""
    for _ in range(2 * SLOTS - 1):
        verb_log.log_verb("mw.sum", log=behind)
    assert divergence(watch.trails(), [0, 1]) == ""
    verb_log.log_verb("mw.load", log=behind)
    verb_log.log_verb("mw.sum", log=ahead)
    assert "rank 1 reached mw.load" in divergence(watch.trails(), [])


def test_a_rank_that_parts_because_it_raises_has_time_to_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    trail(tmp_path, 0, ["mw.sum"])
    trail(tmp_path, 1, ["mw.load"])
    watch, seen = DivergenceWatch(tmp_path, [0, 1]), []
    for _ in range(12):
        seen.append(bool(watch.look([])))
        clock[0] += GRACE / 5
    assert seen[:5] == [False] * 5 and any(seen)


def test_verbs_of_other_threads_are_not_in_order_and_not_noted(tmp_path: Path) -> None:
    log = VerbLog(trail_path(tmp_path, 0))
    verb_log.log_verb("mw.sum", log=log)
    thread = threading.Thread(target=verb_log.log_verb, args=("mw.load",), kwargs={"log": log})
    thread.start()
    thread.join()
    found = read_trail(trail_path(tmp_path, 0))
    assert found is not None and found.count == 1


def loop(folder: Path, rank: int, batches: int) -> None:
    """A training loop that is left after so many batches, and an evaluation."""
    verb_log.begin(trail_path(folder, rank))
    try:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=2)
        with mw.session():
            model, optimizer, data = mw.distribute(model, optimizer, data, view="rank")
            for step, (x,) in enumerate(data):
                mw.backward(model(x).mean())
                optimizer.step()
                if step + 1 == batches:
                    break
            mw.sum(1)
    finally:
        verb_log.end()


def test_a_program_notes_its_verbs_and_the_loop_that_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, batches in enumerate((2, 4)):
        monkeypatch.setattr(distributed_loader, "_loaders", itertools.count(1))  # each rank is a process of its own
        loop(tmp_path, rank, batches)
    first = loop.__code__.co_firstlineno
    text = divergence(DivergenceWatch(tmp_path, [0, 1]).trails(), [0, 1])
    left = f"left its loop at {place(__file__, first + 13)} after 2 batches"
    assert f"rank 0 {left} and reached mw.sum at {place(__file__, first + 14)};" in text
    assert f"rank 1 reached batch 3 of the loop at {place(__file__, first + 9)}." in text
