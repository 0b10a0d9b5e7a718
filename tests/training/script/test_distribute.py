"""The contract of the two lines: several devices leave what one device leaves."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import meshwise as mw
from meshwise.spec.plan_file import plan_to_toml
from meshwise.spec.world import World
from meshwise.training.process.session import default_engine, end_sessions
from meshwise.training.script import files
from meshwise.transfer import collectives
from meshwise.workers.environment import PLAN_FILE
from tests.pool import CaseFailed

SIZES = [2, 3]


def data(samples: int = 21) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def both(case: Any, size: int, pool: Any) -> tuple[Any, list[Any]]:
    """What `case` gives on one device, here, and on `size` ranks."""
    end_sessions()
    return case(), pool(size).run(case)


def train(epochs: int = 2, batch_size: int = 4) -> Any:
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = DataLoader(data(), batch_size=batch_size, shuffle=True)
    model, optimizer, scheduler, loader = mw.distribute(model, optimizer, scheduler, loader, view="rank")
    losses, norms = [], []
    for _ in range(epochs):
        for x, y in loader:
            losses.append(float(mw.backward(nn.functional.cross_entropy(model(x), y))))
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return losses, norms, {k: v.clone() for k, v in model.state_dict().items()}, scheduler.last_epoch, len(loader)


@pytest.mark.parametrize("size", SIZES)
def test_losses_norms_weights_and_ticks_are_those_of_one_device(size: int, pool: Any) -> None:
    want, results = both(train, size, pool)
    assert want[3] == 12
    for got in results:
        same(got, want)


def test_a_batch_smaller_than_the_number_of_devices_works(pool: Any) -> None:
    def case() -> Any:
        return train(epochs=1, batch_size=2)

    want, results = both(case, 4, pool)
    for got in results:
        same(got, want)


def token_mean() -> Any:
    """Lengths 2 to 60, mean over tokens; two batches accumulated, then one reduced, three times over."""
    torch.manual_seed(1)
    model = net()
    lengths = torch.randint(2, 61, (24,))
    xs = [torch.randn(int(n), 6, dtype=torch.float64) for n in lengths]
    ys = [torch.randint(0, 2, (int(n),)) for n in lengths]
    loader = DataLoader(list(zip(xs, ys, strict=True)), batch_size=4, collate_fn=lambda rows: rows)
    model, loader = mw.distribute(model, loader, view="rank")
    gradients = []
    for number, rows in enumerate(loader):
        tokens = sum(len(x) for x, _ in rows)
        total = torch.stack([nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in rows]).sum()
        if number % 2 == 0:
            with mw.accumulate():
                mw.backward(total / tokens, weight=tokens)
        else:
            loss = mw.backward(total / tokens, weight=torch.tensor(tokens))
            gradients.append([loss, *(p.grad.clone() for p in model.parameters())])
            model.zero_grad()
    return gradients


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_token_mean_is_weighted_by_its_tokens(size: int, pool: Any) -> None:
    want, results = both(token_mean, size, pool)
    for got in results:
        same(got, want)


class Numbers(IterableDataset[Any]):
    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __iter__(self) -> Any:
        for i in range(self.counts[mw.rank() % len(self.counts)]):
            yield torch.full((6,), float(i + 10 * mw.rank()), dtype=torch.float64)


def test_streams_of_6_and_4_items_end_together_and_count_every_item(pool: Any) -> None:
    def case() -> Any:
        model, loader = mw.distribute(net(), DataLoader(Numbers((6, 4)), batch_size=2), streams="per-rank", view="rank")
        losses, items = [], 0
        for x in loader:
            losses.append(float(mw.backward(model(x).pow(2).mean(1).mean())))
            items += mw.sum(len(x))
        return losses, items, [p.grad for p in model.parameters()]

    results = pool(2).run(case)
    same(results[0], results[1])
    losses, items, _ = results[0]
    assert len(losses) == 6 and items == 10
    model, want = net(), []
    for i in range(6):
        rows = list(([i] if i < 6 else []) + ([10 + i] if i < 4 else []))
        x = torch.stack([torch.full((6,), float(r), dtype=torch.float64) for r in rows])
        want.append(float(model(x).pow(2).mean().detach()))
    same(losses, want)


def test_streams_of_their_own_go_on_where_each_was(pool: Any) -> None:
    """Also behind the end of one of them."""

    def case(given: int) -> Any:
        def begun() -> Any:
            return mw.distribute(net(), DataLoader(Numbers((4, 12)), batch_size=4), streams="per-rank", view="rank")

        model, loader = begun()
        items = []
        for number, x in enumerate(loader, 1):
            items.append(x[:, 0].tolist())
            mw.backward(model(x).mean())
            if number == given:
                state = loader.state_dict()
        model, loader = begun()
        loader.load_state_dict(state)
        rest = []
        for x in loader:
            rest.append(x[:, 0].tolist())
            mw.backward(model(x).mean())
        return items[given:], rest

    for given in (1, 2, 4):
        for want, got in pool(2).run(case, given):
            assert len(got) == len(want) and (got == want or set(map(len, want)) == {1})


def test_a_whole_stream_is_shared_out_like_a_data_set(pool: Any) -> None:
    class Whole(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from data(13)

    def case() -> Any:
        model, loader = mw.distribute(net(), DataLoader(Whole(), batch_size=4), view="rank")
        losses = [float(mw.backward(nn.functional.cross_entropy(model(x), y))) for x, y in loader]
        return losses, [p.grad for p in model.parameters()]

    want, results = both(case, 3, pool)
    assert len(want[0]) == 4
    for got in results:
        same(got, want)


def test_a_stream_that_splits_itself_is_noticed_and_the_remedy_named(pool: Any) -> None:
    def case() -> Any:
        model, loader = mw.distribute(net(), DataLoader(Numbers((6, 4)), batch_size=2), view="rank")
        for x in loader:
            mw.backward(model(x).mean())

    with pytest.raises(CaseFailed) as failed:
        pool(2).run(case)
    assert "streams='per-rank'" in failed.value.text


def test_a_stream_of_equal_parts_that_splits_itself_is_noticed_too(pool: Any) -> None:
    def case() -> Any:
        for _ in mw.distribute(DataLoader(Numbers((6,)), batch_size=2), view="rank"):
            pass

    with pytest.raises(CaseFailed) as failed:
        pool(2).run(case)
    assert failed.value.kind == "DataError" and "streams='per-rank'" in failed.value.text


class Ready(IterableDataset[Any]):
    """Gives batches, the last one with fewer rows than ranks."""

    def __iter__(self) -> Any:
        for x, y in zip(*(part.split([5, 7, 8, 1]) for part in data().tensors), strict=True):
            yield {"x": x, "y": y.numpy(), "note": None}


@pytest.mark.parametrize("size", [2, 3])
def test_ready_batches_are_split_by_rows(size: int, pool: Any) -> None:
    def case() -> Any:
        torch.manual_seed(2)
        model, stream, rows = mw.distribute(
            net(),
            DataLoader(Ready(), batch_size=None),
            DataLoader(list(Ready()), batch_size=None, shuffle=True),
            view="rank",
        )
        state = []
        for loader in (stream, rows):
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch["x"]), torch.as_tensor(batch["y"]))
                state.append(float(mw.backward(loss)))
        return state, [p.grad for p in model.parameters()]

    want, results = both(case, size, pool)
    assert len(want[0]) == 8
    for got in results:
        same(got, want)


def test_a_loader_keeps_the_attributes_of_the_users() -> None:
    given = DataLoader(data(), batch_size=4, shuffle=True, drop_last=True, generator=torch.Generator(), timeout=0)
    loader = mw.distribute(given, view="rank")
    names = ["num_workers", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator", "pin_memory", "timeout"]
    assert all(getattr(loader, name) is getattr(given, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'batches'"):
        _ = loader.batches
    assert copy.copy(loader).batch_size == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_resumed_in_the_middle_of_an_epoch_reads_the_same_rest(workers: int, pool: Any) -> None:
    def case(stop: int | None, state: Any) -> Any:
        torch.manual_seed(0)
        rows = [int(i) for i in range(40)]
        loader = mw.distribute(DataLoader(rows, batch_size=6, shuffle=True, num_workers=workers), view="rank")
        if state is not None:
            loader.load_state_dict(state)
        seen = []
        for epoch in range(2):
            for number, batch in enumerate(loader):
                own = batch if default_engine().part.samples else batch[:0]
                seen.append(sorted(i for part in collectives.gather_objects(own.tolist()) for i in part))
                if epoch == 0 and number + 1 == stop:
                    return seen, loader.state_dict()
        return seen, None

    (before, state), *_ = pool(2).run(case, 3, None)
    (after, _), *_ = pool(3).run(case, None, state)
    (whole, _), *_ = pool(2).run(case, None, None)
    assert before + after[: len(whole) - 3] == whole


def test_an_unused_parameter_keeps_grad_none_and_one_used_on_some_ranks_is_averaged_with_zero(pool: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.always, self.never = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()
            self.odd, self.even = nn.Linear(6, 2).double(), nn.Linear(6, 2).double()

        def forward(self, x: Any) -> Any:
            return self.always(x) + torch.stack(
                [(self.odd if i % 2 else self.even)(r) for i, r in zip(self.ids, x, strict=True)]
            )

    def case() -> Any:
        model, loader = mw.distribute(Two(), DataLoader(list(enumerate(data(8).tensors[0])), batch_size=2), view="rank")
        result = []
        for ids, x in loader:
            model.ids = ids.tolist()
            mw.backward(model(x).pow(2).mean())
            result.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
            model.zero_grad()
        return result

    want, results = both(case, 2, pool)
    assert want[0]["never.weight"] is None and want[0]["odd.weight"] is not None
    for got in results:
        same(got, want)


def test_start_values_are_those_of_rank_0(pool: Any) -> None:
    def case() -> Any:
        torch.manual_seed(mw.rank())
        model = mw.distribute(nn.Linear(3, 3), view="rank")
        return model.weight.detach().clone()

    first, second = pool(2).run(case)
    torch.manual_seed(0)
    assert torch.equal(first, nn.Linear(3, 3).weight) and torch.equal(first, second)


def test_a_foreign_sampler_runs_whole_on_every_rank(pool: Any) -> None:
    def case() -> Any:
        torch.manual_seed(0)
        sampler = WeightedRandomSampler([1.0, 2.0, 3.0] * 7, 13)
        loader = mw.distribute(DataLoader(list(range(21)), batch_size=4, sampler=sampler), view="rank")
        rows = [collectives.gather_objects(b.tolist() if default_engine().part.samples else []) for b in loader]
        return [[i for part in row for i in part] for row in rows], len(loader)

    want, results = both(case, 3, pool)
    assert want[1] == 4 and results == [want] * 3


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_does_not_depend_on_ranks_or_loader_workers(workers: int, pool: Any) -> None:
    def case(workers: int) -> Any:
        torch.manual_seed(0)
        loader = mw.distribute(DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers), view="rank")
        seen = {}
        for _ in range(2):
            for ids, draws in loader:
                for part in collectives.gather_objects((ids.tolist(), draws.tolist())):
                    seen.update({(loader.state_dict()["epoch"], i): d for i, d in zip(*part, strict=True)})
        return seen

    end_sessions()
    want = case(0)
    assert len({tuple(d) for d in want.values()}) == 18
    assert pool(2).run(case, workers) == [want] * 2


@pytest.mark.parametrize("plan", [mw.Plan(tensor=2), mw.Plan(context=2), mw.Plan(shard=2)], ids=str)
def test_one_rank_alone_writes_what_all_hold_together(plan: mw.Plan, pool: Any, tmp_path: Any) -> None:
    """Each rank that holds a part of one model wrote, and all but one have nothing to write: the file was None."""

    def case(folder: str) -> Any:
        writes, write = list[Any](), files.write_with
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PLAN_FILE, f"{folder}/plan.toml")
            patch.setattr(files, "write_with", lambda path, content: (writes.append(path), write(path, content)))
            model: Any = mw.distribute(net(), view="rank")
            mw.save(model.state_dict(), f"{folder}/model.pt")
            return len(writes), mw.load(f"{folder}/model.pt")

    (tmp_path / "plan.toml").write_text(plan_to_toml(plan))
    (first, loaded), (second, other) = pool(2).run(case, str(tmp_path))
    assert (first, second) == (1, 0)
    same(loaded, dict(net().state_dict()))
    same(other, dict(net().state_dict()))


@pytest.mark.parametrize("plan", [mw.Plan(tensor=2), mw.Plan(context=2), mw.Plan(data=2)], ids=str)
def test_ranks_of_one_model_wait_for_each_other_too(plan: mw.Plan, pool: Any, tmp_path: Any) -> None:
    """They read what rank 0 had not written: the weights of an epoch before, or nothing."""

    def case(folder: str) -> list[bool]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PLAN_FILE, f"{folder}/plan.toml")
            mw.distribute(net(), view="rank")
        there = []
        for name in ("barrier", "main_first"):
            file = Path(folder, name)
            with mw.main_first() if name == "main_first" else contextlib.nullcontext():
                if mw.is_main():
                    time.sleep(0.3)
                    file.write_text("")
                if name == "barrier":
                    mw.barrier()
                there.append(file.exists())
        return there

    (tmp_path / "plan.toml").write_text(plan_to_toml(plan))
    assert pool(2).run(case, str(tmp_path)) == [[True, True]] * 2


def test_save_writes_once_and_load_reads_it_on_every_rank(pool: Any, tmp_path: Any) -> None:
    def case(path: str) -> Any:
        meet = files._all_come
        with pytest.MonkeyPatch.context() as patch:  # the pool's store keeps where an earlier case's loads have met
            patch.setattr(files, "_all_come", lambda key, *more: meet(f"{path}/{key}", *more))
            for value in range(3):
                mw.save({"value": value, "t": torch.ones(1000)}, path)
                assert mw.load(path)["value"] == value
            return mw.load(path)["t"].sum().item()

    assert pool(2).run(case, str(tmp_path / "state.pt")) == [1000.0] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]


def test_wrong_things_are_refused_in_a_sentence() -> None:
    with pytest.raises(mw.UsageError, match="wrap one DataLoader, but was passed a list"):
        mw.distribute([1, 2], view="rank")
    with pytest.raises(mw.UsageError, match="batches that can be split by rows"):
        next(iter(mw.distribute(DataLoader([object()], batch_size=None), view="rank")))
    with pytest.raises(mw.DataError, match="empty"):
        mw.distribute(DataLoader([], batch_size=2), view="rank")
    assert copy.copy(World()).size == 1


LEFT_OPEN = """
import torch, meshwise as mw
from torch import nn
held = nn.Embedding(6, 2, sparse=True)
optimizer = torch.optim.SparseAdam(held.parameters())
held, optimizer, loader = mw.distribute(held, optimizer, torch.utils.data.DataLoader(torch.arange(6), 2))
batches = iter(loader)
held(next(batches)).sum().backward()
optimizer.step()
"""


def test_a_loop_that_is_open_at_the_end_and_sparse_gradients_are_no_error(processes: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEFT_OPEN)
    for words in (["train.py"], ["-m", "meshwise", "run", "--devices", "1xcpu", "train.py"]):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
