"""What adds up over batches with fewer samples than there are ranks, and is joined after the loop, is refused where the
program begins; what is joined in the loop, or read in another way, is not.

Of slips/padded_sums.py. Each case is a program on three devices, whose loader is given to `mw.distribute`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import meshwise as mw
from meshwise.process.session import end_sessions
from meshwise.slips.padded_sums import refuse_padded_sums
from meshwise.spec.errors import UsageError

Case = Callable[[], Any]
REFUSED: list[Case] = []
RIGHT: list[Case] = []


def refused(case: Case) -> Case:
    REFUSED.append(case)
    return case


def right(case: Case) -> Case:
    RIGHT.append(case)
    return case


def loader(samples: int, size: int, **settings: Any) -> Any:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=size, **settings)


def total_of(held_out: Any) -> int:
    total = 0
    for (x,) in held_out:
        total += len(x)
    return mw.sum(total)


def total_of_each(held_out: Any) -> int:
    return sum(mw.sum(len(x)) for (x,) in held_out)


@refused
def every_batch_is_too_small() -> None:
    batches = mw.distribute(loader(8, 2), view="rank")
    seen = 0
    for (x,) in batches:
        seen = seen + len(x)
        if seen > 3:
            break
    mw.sum(seen)


@refused
def the_last_batch_is_too_small() -> None:
    _, batches = mw.distribute(loader(8, 4), loader(9, 4, shuffle=True), view="rank")
    for _epoch in range(2):
        loss, count = 0.0, 0
        for step, (x,) in enumerate(batches):
            loss += float(x.sum())
            count += len(x) + step * 0
        print(mw.mean(loss / count, weight=count))


@refused
def a_function_adds_up() -> None:
    train, batches = mw.distribute(loader(6, 3), loader(4, 3), view="rank")
    print(total_of(train))
    print(total_of(held_out=batches))


@right
def sums_in_the_loop() -> None:
    batches = mw.distribute(loader(8, 2), view="rank")
    seen = 0
    for (x,) in batches:
        seen += mw.sum(len(x))
    assert seen == 8


@right
def another_loader_has_small_batches() -> None:
    small, batches = mw.distribute(loader(4, 2), loader(6, 3), view="rank")
    assert total_of(batches) == 6 and total_of_each(small) == 4


@right
def the_last_batch_is_dropped() -> None:
    batches = mw.distribute(loader(10, 3, drop_last=True), view="rank")
    assert total_of(batches) == 9


@right
def the_last_batch_is_not_read() -> None:
    batches = mw.distribute(loader(7, 3), view="rank")
    seen = 0
    for step, (x,) in enumerate(batches):
        if step == 2:
            break
        seen += len(x)


@right
def the_count_begins_anew() -> None:
    batches = mw.distribute(loader(4, 3), view="rank")
    seen = 0
    for (x,) in batches:
        seen += len(x)
    for _ in mw.distribute(loader(6, 3), view="rank"):
        pass
    seen = 2
    assert mw.sum(seen) == 6


@right
def a_sampler_that_draws_more() -> None:
    data = TensorDataset(torch.arange(4))
    batches = mw.distribute(DataLoader(data, batch_size=3, sampler=RandomSampler(data, num_samples=6)), view="rank")
    assert total_of(batches) == 6


def told(case: Case) -> str:
    end_sessions()
    try:
        case()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_is_refused_where_the_loader_is_distributed(case: Case, pool: Any) -> None:
    function = total_of if case is a_function_adds_up else case
    lines, first = inspect.getsourcelines(function)
    line = first + next(number for number, text in enumerate(lines) if "mw.sum(" in text or "mw.mean(" in text)
    for text in pool(3).run(told, case):
        assert f"test_padded_sums.py:{line}: mw." in text and "fewer than the 3 ranks" in text
        assert "inside the loop, on each batch's value, or use at most" in text


def test_64_ranks_of_a_small_evaluation_are_refused_before_the_first_step() -> None:
    """As `mw.distribute` asks it; none of the 64 is started."""
    distribute = partial(refuse_padded_sums, ranks=64)
    with pytest.raises(UsageError, match=r"mw\.sum of total, .* each batch of its loader has 32 samples, .* 64 ranks"):
        test = distribute([loader(40, 32)], view="rank")
        print(total_of(test))


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_is_taken(case: Case, pool: Any) -> None:
    assert pool(3).run(told, case) == [""] * 3
