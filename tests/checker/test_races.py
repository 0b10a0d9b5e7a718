"""`check --perturb` (torch_compat/perturbed.py): races that a quiet run hides are found, none in runs that have
none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.spec.plan import Plan
from meshwise.torch_compat.perturbed import perturbed
from meshwise.torch_compat.reducer import default_store
from meshwise.transfer import collectives
from tests.checker import decoders
from tests.checker.jobs_to_check import checked
from tests.checker.seams import after_update, around, replaced


def mean_is_not_waited_for(patch: Any) -> None:
    """The all-reduce of a bucket runs on while its gradients are used."""

    def begin(tensor: Tensor, **of: Any) -> Any:
        dist.all_reduce(tensor.div_(collectives.world_size()), async_op=True)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(tensor)
        return done

    replaced(patch, "mean of a bucket", begin)


def sum_is_not_waited_for(patch: Any) -> None:
    """The loss is divided by a sum of weights that is still under way."""

    def begin(tensor: Tensor, **of: Any) -> Any:
        dist.all_reduce(tensor, async_op=True)
        return SimpleNamespace(wait=lambda: tensor)

    replaced(patch, "asynchronous sum", begin)


def read_before_a_broadcast(patch: Any) -> None:
    """What another rank has stepped is read before it has come."""

    def broadcast(flat: Tensor, owner: int, **of: Any) -> Tensor:
        dist.broadcast(flat, owner, async_op=True)
        return flat

    replaced(patch, "collectives of zero1", SimpleNamespace(broadcast=broadcast))


def gather_is_not_waited_for(patch: Any) -> None:
    """A batch norm takes statistics of other ranks that have not come yet."""

    def all_gather(tensor: Tensor, *rest: Any, **of: Any) -> Tensor:
        found = [torch.zeros_like(tensor) for _ in range(2)]
        dist.all_gather(found, tensor, async_op=True)
        return torch.stack(found)

    alone = SimpleNamespace(all_gather=all_gather, all_reduce=collectives.all_reduce)
    replaced(patch, "collectives of batch norms", alone)


def changed_while_it_is_sent(patch: Any) -> None:
    """A stage uses the memory of a hidden state again before its send has ended."""

    def begin_send(real: Any, tensor: Tensor, *rest: Any) -> Any:
        wait = real(tensor, *rest)
        if tensor.is_floating_point():
            tensor.detach().mul_(1 + 1e-3)
        return wait

    around(patch, "send that is begun", begin_send)


def receive_is_not_waited_for(patch: Any) -> None:
    def receive(real: Any, tensor: Tensor, source: int, group: Any = None) -> Tensor:
        if not tensor.is_floating_point():
            return real(tensor, source, group)
        kept.append(dist.irecv(tensor.view(-1).view(torch.uint8), group=group, group_src=source))
        return tensor

    kept: list[Any] = []
    around(patch, "receive", receive)


def written_while_it_is_reduced(patch: Any) -> None:
    """A bucket is written again before its all-reduce has ended."""

    def begin(real: Any, tensor: Tensor, **of: Any) -> Any:
        future = real(tensor, **of)
        tensor.zero_()
        return future

    around(patch, "mean of a bucket", begin)


def waits_for_another(patch: Any) -> None:
    """Of two exchanges, the second is waited for, and the first is used."""

    def begin(tensor: Tensor, **of: Any) -> Any:
        dist.all_reduce(tensor.div_(collectives.world_size()), async_op=True)
        other = dist.all_reduce(torch.zeros(1), async_op=True)
        assert other is not None
        return other.get_future().then(lambda done: (done.value(), tensor)[1])

    replaced(patch, "mean of a bucket", begin)


def usually_there(patch: Any) -> None:
    """Rank 1 looks for what rank 0 tells behind an exchange: ten milliseconds later it has always been there."""

    def tell(training: Any) -> None:
        store, name = default_store(), collectives.broadcast_object(f"tests/checker/races/{time.monotonic_ns()}")
        for number in range(40):
            key = f"{name}/{training.step}/{number}"
            dist.all_reduce(torch.zeros(1))
            if training.rank == 0:
                store.set(key, "1")
                continue
            time.sleep(0.01)
            if not store.check([key]):
                training.model.net[0].bias.data.add_(1e-3)

    after_update(patch, tell)


@dataclass(frozen=True)
class Race:
    """A plant, a job and a plan. said: whether it is known for what it is, and not by its effect alone."""

    plant: Callable[[Any], None]
    job: str
    plan: Plan
    said: bool = True


RACES = [
    Race(mean_is_not_waited_for, "counting", Plan(data=2)),
    Race(sum_is_not_waited_for, "weighed", Plan(data=2)),
    Race(read_before_a_broadcast, "counting", Plan(data=2, zero1=True)),
    Race(gather_is_not_waited_for, "normed", Plan(data=2)),
    Race(changed_while_it_is_sent, "decoder", Plan(pipeline=2, accumulate=2)),
    Race(receive_is_not_waited_for, "decoder", Plan(pipeline=2, accumulate=2)),
    Race(written_while_it_is_reduced, "counting", Plan(data=2)),
    Race(waits_for_another, "counting", Plan(data=2)),
    Race(usually_there, "counting", Plan(data=2), said=False),
]
CLEAN = [
    ("counting", Plan(data=2)),
    ("normed", Plan(data=2, zero1=True)),
    ("decoder", Plan(shard=2, recompute="full")),
    ("decoder, tied", Plan(pipeline=2, accumulate=2)),
    ("experts, clipped", Plan(tensor=2)),
    ("decoder", Plan(context=2)),
    ("two-tower", Plan(shard=2, accumulate=2)),
    ("dropped", Plan(data=2, accumulate=2)),
]


def cases(of: list[Any], quick: int) -> list[Any]:
    return [pytest.param(each, marks=[pytest.mark.slow] * (n >= quick)) for n, each in enumerate(of)]


@pytest.mark.parametrize("race", cases(RACES, 2))
def test_a_race_is_found_when_communication_is_perturbed(race: Race, pool: Any) -> None:
    cloudpickle.register_pickle_by_value(decoders)
    proof = checked(pool, race.job, race.plan, plant=race.plant, perturb=True)
    assert not proof.equal and proof.cause is not None
    assert proof.cause.name == "race" or not race.said, proof.cause


@pytest.mark.parametrize("clean", cases(CLEAN, 1))
def test_no_race_is_found_where_there_is_none(clean: tuple[str, Plan], pool: Any) -> None:
    cloudpickle.register_pickle_by_value(decoders)
    for seed in (0, 1):
        proof = checked(pool, *clean, seed=seed, perturb=True)
        assert proof.equal, (proof.comparison.first, proof.cause)


class _Work:
    """An exchange that ends where it is waited for, and adds one."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> bool:
        self._tensor += 1
        return True


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, async_op=False: _Work(tensor) if async_op else None)
    monkeypatch.setattr(dist, "isend", lambda tensor: _Work(tensor.clone()))


def test_a_buffer_is_not_a_number_until_its_exchange_has_ended(quiet: None) -> None:
    with perturbed(0, 0) as found:
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None and x.isnan().all()
        work.wait()
    assert x.tolist() == [2, 2, 2] and not found.races


def test_what_is_wrong_with_an_exchange_is_said_with_its_line(quiet: None) -> None:
    with perturbed(0, 0) as found:
        x, y = torch.ones(3), torch.ones(2)
        work, sent = dist.all_reduce(x, async_op=True), dist.isend(y)
        assert work is not None and sent is not None
        x.zero_()
        y.zero_()
        work.wait()
        sent.wait()
        dist.isend(y)
    said = [race.partition(" at ")[0] + ":" + race.rpartition(":")[2] for race in found.races]
    assert said == [
        "all_reduce: its buffer was written before the exchange ended",
        "isend: its data was changed before the exchange ended",
        "isend: the program never waited for it",
    ]
    assert "test_races.py" in found.races[0]
