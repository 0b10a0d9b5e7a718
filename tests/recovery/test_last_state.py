"""What ranks leave of the state after the last step, and the checkpoint that is made of it.

Of recovery/last_state.py, recovery/left_memory.py, records/left_parts.py, recovery/side_copies.py and
compat/copying.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.compat.tree import tensors_in
from meshwise.records.left_parts import commit_parts, newest_whole, read_parts
from meshwise.recovery.last_state import Among, LastState
from meshwise.recovery.loading import open_newest
from meshwise.recovery.state import RunState, tree_of, unpack


def a_state(optimizer: Any = torch.optim.Adam) -> RunState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    chosen = optimizer(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(chosen, 2, 0.5)
    return RunState(model, chosen, schedule, torch.amp.GradScaler("cpu", enabled=False), seed=3)


def forward(state: RunState) -> Tensor:
    torch.manual_seed(state.step)
    value: Tensor = state.model(torch.randn(8, 3)).pow(2).mean()
    return value


def step(state: RunState) -> None:
    forward(state).backward()
    state.before_change()
    state.whole = False
    state.optimizer.step()
    state.optimizer.zero_grad()
    assert state.scheduler is not None
    state.scheduler.step()
    state.step, state.index, state.whole = state.step + 1, state.index + 8, True


def memory(tmp_path: Path, rank: int = 0) -> Path:
    path = tmp_path / f"memory{rank}"
    path.touch()
    return path


def restored(tmp_path: Path, paths: list[Path], like: RunState) -> RunState:
    parts = [part for rank, path in enumerate(paths) for part in read_parts(path, rank)]
    saved = commit_parts(tmp_path / "checkpoint", newest_whole(parts, 1))
    assert saved is not None
    unpack(like, open_newest(tmp_path / "checkpoint").tree)
    return like


def same(one: RunState, other: RunState) -> bool:
    def plain(state: RunState) -> Any:
        tree = tree_of(state)
        return [t.detach() for t in tensors_in(tree)], tree["optimizer"]["param_groups"], tree["scheduler"]

    (mine, *values), (theirs, *others) = plain(one), plain(other)
    where = (one.epoch, one.index, one.step, one.seed) == (other.epoch, other.index, other.step, other.seed)
    return where and values == others and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


OPTIMIZERS = {
    "adam": torch.optim.Adam,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "lbfgs": lambda parameters, lr: torch.optim.Adamax(parameters, lr),
    "tensor lr": lambda parameters, lr: torch.optim.AdamW(parameters, lr=torch.tensor(lr), foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_written_is_the_state_after_the_step(name: str, tmp_path: Path) -> None:
    state = a_state(OPTIMIZERS[name])
    last = LastState(memory(tmp_path), state, Among(1, 1), {"plan": ""})
    for _ in range(5):
        step(state)
        last.note()
        last.write()
    assert last.found_again is (name != "tensor lr")
    step(state)  # noted no more
    twin = a_state(OPTIMIZERS[name])
    for _ in range(5):
        step(twin)
    assert same(restored(tmp_path, [memory(tmp_path)], a_state(OPTIMIZERS[name])), twin)


def test_a_step_that_has_failed_leaves_the_state_before_it(tmp_path: Path) -> None:
    state, twin = a_state(), a_state()
    for each in (state, twin):
        step(each)
    last = LastState(memory(tmp_path), state, Among(1, 1, whole=True), {"plan": ""})
    last.note()
    forward(state).backward()  # buffers have changed
    assert last.leave()
    assert same(restored(tmp_path, [memory(tmp_path)], a_state()), twin)


def test_a_state_that_has_begun_to_change_is_not_left(tmp_path: Path) -> None:
    state = a_state()
    last = LastState(memory(tmp_path), state, Among(1, 1), {"plan": ""})
    assert not last.leave()
    last.note()
    state.before_change()
    state.whole = False
    assert not last.leave()
    state.whole = True
    with torch.no_grad():
        next(state.model.parameters()).add_(1.0)
    assert not last.leave()
    assert list(read_parts(memory(tmp_path), 0)) == []


def test_buffers_and_parameters_that_are_replaced_are_found(tmp_path: Path) -> None:
    state = a_state()
    last = LastState(memory(tmp_path), state, Among(1, 1), {"plan": ""})
    step(state)
    last.note()
    state.model[1].running_mean = torch.full((4,), 7.0)  # type: ignore[index, assignment]
    state.model[0].weight.data = torch.full((4, 3), 2.0)  # type: ignore[index, union-attr]
    last.note()
    last.write()
    found = restored(tmp_path, [memory(tmp_path)], a_state())
    assert found.model.state_dict()["1.running_mean"].tolist() == [7.0] * 4
    assert bool((found.model.state_dict()["0.weight"] == 2.0).all())


def test_replicas_with_parts_of_the_optimizers_state_of_their_own_deal_the_rest_alike(tmp_path: Path) -> None:
    written: list[str] = []
    for rank in range(3):
        state = a_state()
        step(state)
        for number, parameter in enumerate(state.model.parameters()):  # the first rank has most of it
            if (number >= 3) is (rank == 0) or (rank > 0 and number % 2 != rank % 2):
                del state.optimizer.state[parameter]
        among = Among(3, 1, own=rank, same=3, divided=True)
        last = LastState(memory(tmp_path, rank), state, among, {"plan": "data=3"})
        last.note()
        last.write()
        (part,) = read_parts(memory(tmp_path, rank), rank)
        written += [
            name for name, (_, _, boxes) in part.layout["tensors"].items() if boxes and "optimizer/" not in name
        ]
    assert sorted(written) == sorted(f"model/{name}" for name in a_state().model.state_dict())


def test_replicas_write_a_share_each_and_only_what_all_have_is_taken(tmp_path: Path) -> None:
    ranks = [a_state() for _ in range(3)]
    paths = [memory(tmp_path, rank) for rank in range(3)]
    kept = [
        LastState(path, state, Among(3, 1, own=rank, same=3), {"plan": "data=3"})
        for rank, (path, state) in enumerate(zip(paths, ranks, strict=True))
    ]
    for number in range(4):
        for rank, (state, last) in enumerate(zip(ranks, kept, strict=True)):
            step(state)
            last.note()
            if number < 3 or rank != 1:  # killed in its fourth step
                last.write()
    whole = LastState(memory(tmp_path, 9), ranks[0], Among(3, 1), {})
    whole.note()
    assert max(last.size for last in kept) < whole.size / 2
    twin = a_state()
    for _ in range(3):
        step(twin)
    assert same(restored(tmp_path, paths, a_state()), twin)


def test_what_is_half_written_or_of_another_attempt_is_not_taken(tmp_path: Path) -> None:
    state, path = a_state(), memory(tmp_path)
    assert list(read_parts(path, 0)) == []
    last = LastState(path, state, Among(1, 2), {"plan": ""})
    step(state)
    last.note()
    last.write()
    parts = list(read_parts(path, 0))
    assert [part.step for part in parts] == [1]
    assert newest_whole(parts, 1) == [] and newest_whole(parts, 2) == parts
    again = LastState(path, state, Among(1, 3), {"plan": ""})
    again.note()  # laid out anew: what was there is no more
    assert list(read_parts(path, 0)) == []


def test_a_state_as_new_as_the_newest_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    state, path = a_state(), memory(tmp_path)
    last = LastState(path, state, Among(1, 1), {"plan": ""})
    step(state)
    last.note()
    last.write()
    parts = newest_whole(list(read_parts(path, 0)), 1)
    assert commit_parts(tmp_path / "checkpoint", parts) is not None
    assert commit_parts(tmp_path / "checkpoint", parts) is None


@pytest.mark.gpu
def test_copies_of_a_gpu_are_of_the_step_that_was_noted(tmp_path: Path) -> None:
    state = a_state()
    state.model.cuda()
    last = LastState(memory(tmp_path), state, Among(1, 1), {"plan": ""})
    state.before_change = last.settle
    for _ in range(4):
        state.model(torch.randn(8, 3, device="cuda")).pow(2).mean().backward()
        state.before_change()
        state.whole = False
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step, state.whole = state.step + 1, True
        last.note()
        last.write()
    noted = [tensor.detach().cpu() for tensor in tensors_in(tree_of(state)["model"])]
    state.model(torch.randn(8, 3, device="cuda"))  # changes buffers while it is copied
    last.settle()
    with torch.no_grad():
        for p in state.model.parameters():
            p.zero_()
    torch.cuda.synchronize()
    last.leave()  # settles what is being copied; the parameters are others by now
    found = restored(tmp_path, [memory(tmp_path)], a_state())
    assert found.step in (3, 4)
    if found.step == 4:
        assert all(torch.equal(a, b) for a, b in zip(tensors_in(tree_of(found)["model"]), noted, strict=True))
