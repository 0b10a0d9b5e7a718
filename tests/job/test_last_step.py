"""What a rank keeps after each step, how often, and the losses that no rank has written yet.

Of job/last_step.py and tracking/loss_ledger.py. What is written is tested in tests/recovery/test_last_state.py.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwise.data.order import epoch_slices
from meshwise.data.source import read_slices
from meshwise.engine.weighing import Losses
from meshwise.job import last_step
from meshwise.job.last_step import LastStep, among
from meshwise.job.options import RunOptions
from meshwise.job.run import begun, make_engine, open_data
from meshwise.job.step import train_step
from meshwise.jobs.registry import find_job
from meshwise.records.left_parts import PLACES, read_parts
from meshwise.recovery.last_state import Among
from meshwise.recovery.state import RunState
from meshwise.rehearsal.estimator import kept_bytes
from meshwise.rehearsal.trace import trace
from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.tracking.loss_ledger import ROWS, LossLedger, ledger_path, noted
from meshwise.workers.environment import ATTEMPT, KEPT
from meshwise.workers.join import join
from tests.pool import Pool


def world(size: int, rank: int = 0, device: str = "cpu") -> World:
    return World(rank, size, rank, size, device)


@pytest.mark.parametrize(
    ("plan", "ranks", "who"),
    [
        (Plan(), world(1), Among(1, 2)),
        (Plan(data=2), world(2), Among(2, 2, whole=True)),
        (Plan(data=2, accumulate=4), world(2), Among(2, 2, whole=True)),
        (Plan(data=2), world(2, 1, "cuda:0"), Among(2, 2, 1, 2)),  # NCCL tells nobody that a peer is gone
        (Plan(data=3, zero1=True), world(3, 2), Among(3, 2, 2, 3, divided=True)),
        (Plan(shard=2), world(2, 1), Among(2, 2, 0, 1)),
        (Plan(data=2, shard=2), world(4, 3), Among(4, 2, 1, 2)),
        (Plan(data=2, tensor=2), world(4, 1), Among(4, 2, 0, 2)),
        (Plan(data=2, pipeline=2, accumulate=2), world(4, 2), Among(4, 2, 1, 2)),
    ],
)
def test_replicas_share_the_keeping(plan: Plan, ranks: World, who: Among, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, "2")
    assert among(plan, ranks) == who


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "memory"
    path.touch()
    (tmp_path / "workers").mkdir()
    monkeypatch.setenv(KEPT, str(path))
    return path


def a_state() -> RunState:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return RunState(model, optimizer, None, torch.amp.GradScaler("cpu", enabled=False), seed=0)


def trained(last: LastStep, state: RunState, steps: int) -> None:
    for _ in range(steps):
        state.model(torch.ones(2, 3)).sum().backward()
        state.before_change()
        state.whole = False
        state.optimizer.step()
        state.step, state.whole = state.step + 1, True
        last.keep()


def steps_in(path: Path) -> list[int]:
    return sorted(part.step for part in read_parts(path, 0))


def test_every_step_is_kept_where_that_is_asked_for(kept: Path) -> None:
    state, said = a_state(), list[str]()
    last = LastStep(state, Plan(), World(), kept.parent, 1, said.append)
    last.keep()
    trained(last, state, 15)
    assert steps_in(kept) == [14, 15]
    assert said == ["each step copies the state to the host's memory: 512 B a rank, 1.0 KiB in all."]


def test_it_is_kept_as_often_as_costs_one_percent(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))  # a step takes 2, of which 1 is for the copy
    state, said = a_state(), list[str]()
    last = LastStep(state, Plan(), World(), kept.parent, None, said.append)
    last.keep()
    trained(last, state, 210)
    assert said == [
        "the state is copied to memory every 100 steps, as a copy takes 100.0 % of a step. A lost worker costs the "
        "steps since the last copy. --redundancy 1 copies after every step."
    ]
    assert steps_in(kept) == [100, 200]


def test_it_is_not_kept_where_memory_is_short(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_step, "free_bytes", lambda device: 1000)
    state, said = a_state(), list[str]()
    last = LastStep(state, Plan(), World(), kept.parent, None, said.append)
    last.keep()
    trained(last, state, 15)
    assert steps_in(kept) == []
    assert len(said) == 1 and "1.0 KiB of 1000 B free memory" in said[0]
    assert last.leave() and steps_in(kept) == [15]  # a step that fails leaves it all the same


def test_what_was_asked_for_and_has_no_room_is_said_and_the_run_goes_on(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_step, "free_bytes", lambda device: 1000)
    state, said = a_state(), list[str]()
    last = LastStep(state, Plan(), World(), kept.parent, 1, said.append)
    last.keep()
    trained(last, state, 3)
    assert steps_in(kept) == [] and len(said) == 1
    assert said[0].startswith("--redundancy 1: the state is not copied to memory, because that takes 1.0 KiB, but only")


@pytest.mark.parametrize("plan", [Plan(data=2), Plan(shard=2), Plan(data=2, zero1=True)], ids=str)
def test_the_bytes_are_those_that_the_rehearsal_tells(plan: Plan, pool: Any, tmp_path: Path) -> None:
    workers: Pool = pool(2)
    job = find_job("mnist-cnn")
    (held, *_) = [each.step.held for each in trace(job, plan, "cpu")]
    written = max(workers.run(bytes_written, str(tmp_path), plan))
    assert kept_bytes(held, plan) == pytest.approx(PLACES * written, rel=0.1)  # whole tensors are dealt


def bytes_written(folder: str, plan: Plan) -> int:
    """What this rank writes after a step, in one of its two places."""
    session, said, job = join(), list[str](), find_job("mnist-cnn")
    path = Path(folder) / f"memory{session.world.rank}"
    path.touch()
    engine = make_engine(session, plan)
    try:
        state = begun(job, plan, engine)
        os.environ[KEPT] = str(path)
        last = LastStep(state, plan, session.world, Path(folder), 1, said.append)
        data = open_data(job, job.data(), "training set")
        steps = epoch_slices(torch.arange(data.samples), job.batch_size, engine.world)
        for step in itertools.islice(steps, 2):
            train_step(engine, job, state, list(read_slices(data.read, step, 0)))
            last.keep()
    finally:
        del os.environ[KEPT]
        engine.close()
    return next(read_parts(path, session.world.rank)).tensors.nbytes


def test_of_replicas_one_writes_and_nothing_is_copied_before(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_step.collectives, "gather_objects", lambda thing, group: [thing])
    state = a_state()
    lasts = [LastStep(state, Plan(data=2), world(2, rank), kept.parent, None, print) for rank in range(2)]
    lasts[0].keep()
    trained(lasts[0], state, 15)
    assert steps_in(kept) == []
    state.before_change()
    state.whole = False
    assert not lasts[0].leave()
    state.whole = True
    assert lasts[0].leave() and steps_in(kept) == [15]
    lasts[1].keep()
    os.truncate(kept, 0)
    assert lasts[1].leave() and steps_in(kept) == []


def test_redundancy_is_one_or_none() -> None:
    with pytest.raises(UsageError, match=r"--redundancy must be 1 .* but it is 2"):
        RunOptions(job="mlp", redundancy=2)


def losses(value: float) -> Losses:
    return [(torch.tensor(value), 4.0), (torch.tensor(2 * value), 2.0)]


def test_losses_of_a_rank_that_is_gone_are_known(tmp_path: Path) -> None:
    ledgers = [LossLedger(tmp_path, rank) for rank in range(2)]
    for step in (3, 4, 5):
        for rank, ledger in enumerate(ledgers):
            ledger.note(1, step, losses(step + rank / 8))
    ledgers[0].note(1, 6, losses(6.0))  # the other was killed before
    again = LossLedger(tmp_path, 0)  # the next attempt
    found = list(noted(tmp_path, 2, 4, 6))
    assert [(epoch, step) for epoch, step, _ in found] == [(1, 4), (1, 5)]
    assert found[0][2].tolist() == [[4 * 4 + 8 * 2, 6], [4.125 * 4 + 8.25 * 2, 6]]
    again.note(2, 4 + ROWS, losses(1.0))
    assert [step for _, step, _ in noted(tmp_path, 2, 4, 6)] == [5]


def test_without_a_whole_ledger_of_each_rank_nothing_is_known(tmp_path: Path) -> None:
    LossLedger(tmp_path, 0).note(0, 1, losses(1.0))
    assert list(noted(tmp_path, 2, 1, 1)) == []
    ledger_path(tmp_path, 1).write_bytes(b"half")
    assert list(noted(tmp_path, 2, 1, 1)) == []
