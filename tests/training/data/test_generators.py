"""The order of the data is the one that torch's own loader draws, and a saved state goes on with it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

import meshwise as mw
from meshwise.parallel import precision
from meshwise.training.data.generators import NUMPY
from meshwise.training.process.session import default_engine, end_sessions
from meshwise.transfer import collectives

ROWS = [torch.tensor(float(i)) for i in range(15)]
Program = Callable[[Callable[..., Any]], list[Any]]
BY_RANK = partial(mw.distribute, view="rank")


class ByHand(Sampler[int]):
    """A user's own, which draws from every generator there is, while it goes on."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(15))
        random.shuffle(order)
        numpy.random.shuffle(order)
        for index in order:
            yield (index + int(torch.randint(13, ()))) % 13

    def __len__(self) -> int:
        return 15


class Stream(IterableDataset[Any]):
    """Draws while it is read."""

    def __iter__(self) -> Iterator[Any]:
        for i in range(11):
            yield torch.tensor([float(i), float(torch.rand(())), random.random()])


def _seeded(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(ROWS, batch_size=4, shuffle=True),
    "last dropped": lambda: DataLoader(ROWS, batch_size=4, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(ROWS, batch_size=4, shuffle=True, generator=_seeded()),
    "sampler's generator": lambda: DataLoader(ROWS, batch_size=4, sampler=RandomSampler(ROWS, generator=_seeded())),
    "replacement": lambda: DataLoader(ROWS, batch_size=4, sampler=RandomSampler(ROWS, True, 40)),
    "weighted": lambda: DataLoader(ROWS, batch_size=4, sampler=WeightedRandomSampler([1.0] * 15, 15)),
    "by hand": lambda: DataLoader(ROWS, batch_size=4, sampler=ByHand()),
    "batch sampler": lambda: DataLoader(ROWS, batch_sampler=BatchSampler(RandomSampler(ROWS), 4, False)),
    "in order": lambda: DataLoader(ROWS, batch_size=4),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
}


def whole(batch: Any) -> list[Any]:
    """The rows of a batch over all ranks."""
    part = default_engine().part if mw.world_size() > 1 else None
    own = batch if part is None or part.samples else batch[:0]
    return [row for rows in collectives.gather_objects(own.tolist()) for row in rows]


def epochs(make: Callable[[], DataLoader[Any]], distribute: Callable[..., Any]) -> list[Any]:
    """Three epochs, a validation with shuffling in each and after it, and what the program draws at the end."""
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    train, test, shuffled = (distribute(loader) for loader in (make(), LOADERS["in order"](), LOADERS["shuffled"]()))
    seen: list[Any] = []
    for _ in range(3):
        for number, batch in enumerate(train):
            seen.append(whole(batch))
            if number == 1:
                seen += [whole(x) for x in shuffled]
        seen += [whole(x) for x in test]
        seen += [[whole(a), whole(b)] for a, b in zip(train, shuffled, strict=False)]
    return [*seen, torch.rand(2).tolist(), random.random(), numpy.random.rand()]


@pytest.mark.parametrize("name", sorted(LOADERS))
def test_one_device_visits_samples_in_the_order_of_plain_torch(name: str) -> None:
    assert epochs(LOADERS[name], mw.distribute) == epochs(LOADERS[name], lambda loader: loader)


@pytest.mark.parametrize("size", [2, 3])
def test_several_devices_take_the_order_of_rank_0(size: int, pool: Any) -> None:
    def case(name: str) -> Any:
        return epochs(LOADERS[name], BY_RANK)

    def unlike() -> Any:
        """Ranks whose generators are in different states: torch's is rank 0's from the loop on."""
        torch.manual_seed(mw.rank())
        train = mw.distribute(LOADERS["shuffled"](), view="rank")
        torch.rand(mw.rank())
        return [whole(batch) for batch in train], torch.rand(()).item()

    for name in ("shuffled", "by hand", "own generator", "stream"):
        end_sessions()
        want = epochs(LOADERS[name], lambda loader: loader)
        assert pool(size).run(case, name) == [want] * size
    end_sessions()
    assert pool(size).run(unlike) == [unlike()] * size


def test_applying_a_plan_draws_nothing(pool: Any) -> None:
    def case(plan: mw.Plan) -> bool:
        precision._tried.cache_clear()
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
        before = torch.get_rng_state()
        mw.distribute(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan, view="rank")
        return torch.equal(torch.get_rng_state(), before)

    plans = [mw.Plan(data=2), mw.Plan(shard=2, precision="bf16", recompute="full"), mw.Plan(data=2, zero1=True)]
    assert [pool(2).run(case, plan) for plan in plans] == [[True, True]] * 3


def trained(distribute: Callable[..., Any], backward: Callable[[Any], Any]) -> Any:
    """Losses and weights of three epochs with shuffling, a validation between them."""
    torch.manual_seed(11)
    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    rows = [row.double().reshape(1) for row in ROWS]
    train, test = DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=4)
    model, optimizer, train, test = distribute(model, optimizer, train, test)
    losses = []
    for _ in range(3):
        for x in train:
            losses.append(float(backward((model(x) - 2 * x).pow(2).mean())))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(sum(float(mw.sum(float(model(x).detach().sum()))) for x in test))
    return losses, [p.detach().clone() for p in model.parameters()]


def test_training_with_shuffling_is_bitwise_plain_torch_and_equal_on_two(pool: Any) -> None:
    def plain(loss: Any) -> Any:
        loss.backward()
        return loss.detach()

    end_sessions()
    want, weights = trained(lambda *objects: objects, plain)
    got, got_weights = trained(BY_RANK, mw.backward)
    assert got == want and all(map(torch.equal, got_weights, weights))
    for losses, _ in pool(2).run(lambda: trained(BY_RANK, mw.backward)):
        torch.testing.assert_close(losses, want, rtol=1e-10, atol=1e-12)


def resumed(name: str, stop: int | None, state: Any) -> Any:
    """Three epochs with a validation in their middle; left after `stop` batches with a state, or begun from one."""
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    train, test = mw.distribute(LOADERS[name](), LOADERS["shuffled"](), view="rank")
    first, done, seen = 0, 0, []
    if state is not None:
        torch.manual_seed(99)
        train.load_state_dict(state["train"])
        test.load_state_dict(state["test"])
        first, done = state["epoch"], state["done"]
    for epoch in range(first, 3):
        for batch in train:
            seen.append(whole(batch))
            done += 1
            if done % 2 == 0:
                seen.append([whole(x) for x in test])
            if done == stop:
                states = {"train": train.state_dict(), "test": test.state_dict(), "epoch": epoch, "done": done}
                return seen, json.loads(json.dumps(states))
    return seen, None


@pytest.mark.parametrize("stop", [1, 2, 4, 6])
@pytest.mark.parametrize("name", ["shuffled", "own generator", "replacement", "by hand", "stream"])
def test_a_loop_goes_on_as_if_it_had_not_been_left(name: str, stop: int) -> None:
    all_of_it, _ = resumed(name, None, None)
    first, state = resumed(name, stop, None)
    rest, _ = resumed(name, None, state)
    assert first + rest == all_of_it


def test_what_two_devices_have_left_goes_on_on_three(pool: Any) -> None:
    all_of_it, _ = resumed("shuffled", None, None)
    first, state = pool(2).run(resumed, "shuffled", 6, None)[0]
    assert [first + rest for rest, _ in pool(3).run(resumed, "shuffled", None, state)] == [all_of_it] * 3


def test_the_state_of_numpy_is_read_as_it_is_whatever_was_drawn() -> None:
    changes: list[Callable[[], Any]] = [
        numpy.random.rand,
        numpy.random.randn,
        numpy.random.randn,
        lambda: numpy.random.seed(3),
        lambda: numpy.random.randn(3),
        lambda: None,
        lambda: numpy.random.shuffle([1, 2, 3]),
        lambda: numpy.random.randn(700),
        lambda: numpy.random.set_state(numpy.random.get_state()),
        lambda: numpy.random.randn(701),
    ]
    for change in [*changes, *changes[::-1], *changes[::2]]:
        change()
        for _ in range(2):
            kind, key, *rest = numpy.random.get_state()
            assert kind == "MT19937" and NUMPY.state() == (key.tobytes(), *rest)


def test_the_state_of_another_generator_of_numpy_is_read_too() -> None:
    given, before = numpy.random.get_bit_generator(), NUMPY.state()
    try:
        numpy.random.set_bit_generator(numpy.random.MT19937(5))
        assert NUMPY.state()[0] == numpy.random.get_state()[1].tobytes() != before[0]
    finally:
        numpy.random.set_bit_generator(given)
    assert NUMPY.state()[0] == before[0]
