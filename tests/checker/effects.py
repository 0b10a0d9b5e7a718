"""What a plan does beside computing the same: counted over one training step, on one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.checker.trace import Batches, CheckSpec
from meshwise.spec.plan import Plan
from meshwise.torch_compat.dispatch import intercept_operators, operator_name
from meshwise.torch_compat.tree import tensors_in
from meshwise.training.data.order import epoch_slices
from meshwise.training.job.run import begun, make_engine, open_data, read_parts
from meshwise.training.job.step import train_step
from meshwise.workers.join import join
from tests.checker.models_to_check import Job

GATHER, SCATTER, REDUCE, SEND = "_allgather_base_", "_reduce_scatter_base_", "allreduce_", "broadcast_"
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution"}


@dataclass
class Effect:
    """The second step of one rank.

    parameters, state: elements that it holds, and the optimizer for them; largest: of one parameter.
    forward, backward: operators by name, the backward with the optimizer's. moved: bytes by collective.
    dtypes: those of the matrix products in the forward.
    kept: bytes that autograd keeps from the forward of a microbatch as they are, on the device.
    copied: bytes of tensors written by copies while the forward ran; stepped: by copies after it.
    """

    parameters: int = 0
    largest: int = 0
    state: int = 0
    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    kept: int = 0
    copied: int = 0
    stepped: int = 0

    @property
    def operators(self) -> int:
        """Operators of the whole step that compute something."""
        both = self.forward + self.backward
        return sum(count for name, count in both.items() if name not in self.moved and name != "detach")

    @property
    def products(self) -> int:
        """Matrix products and convolutions of the whole step."""
        return sum((self.forward + self.backward)[name] for name in PRODUCTS)

    def calls(self, collective: str) -> int:
        """How often a collective was called."""
        return (self.forward + self.backward)[collective]


def effect_of(job: Job, plan: Plan) -> Effect:
    """Take two steps of `job` under `plan` on this rank, and count in the second. Collective."""
    session = join()
    world, engine = session.world, make_engine(session, plan)
    state = begun(job, plan, engine)
    effect, inside = Effect(), [False]
    real = job.loss
    counter = _counter(effect, inside)

    def loss(model: nn.Module, batch: Any) -> Any:
        storages: dict[int, int] = {}
        inside[0] = True

        def keep(tensor: Tensor) -> Tensor:
            source = tensor if tensor._base is None else tensor._base
            if not isinstance(source, nn.Parameter):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = real(model, batch)
        inside[0], effect.kept = False, max(effect.kept, sum(storages.values()))
        return result

    job = replace(job, loss=loss)
    data = open_data(job, job.data(), "training set")
    epoch, batch = next(Batches(job.seed, data.samples, job.batch_size, CheckSpec(plan, 2)).of(1))
    (shares,) = epoch_slices(batch, len(batch), world, plan.accumulate)
    parts = list(read_parts(data, shares, epoch, world.device))
    state.model.train()
    train_step(engine, job, state, parts)
    with intercept_operators(counter):
        train_step(engine, job, state, parts)
    effect.parameters = sum(_held(p) for p in state.model.parameters())
    effect.largest = max(p.numel() for p in state.model.parameters())
    effect.state = sum(
        _held(value) for entry in state.optimizer.state.values() for value in entry.values() if _large(value)
    )
    engine.close()
    return effect


def _counter(effect: Effect, inside: list[bool]) -> Any:
    def counted(operator: Any, args: Any, kwargs: Any) -> Any:
        name = operator_name(operator)
        (effect.forward if inside[0] else effect.backward)[name] += 1
        if "c10d" in str(operator):
            effect.moved[name] += sum(t.nbytes for t in tensors_in(args[1] if name in (GATHER, SCATTER) else args[0]))
        elif inside[0] and name in PRODUCTS:
            effect.dtypes[str(args[0].dtype).removeprefix("torch.")] += 1
        elif name == "copy_" and inside[0]:
            effect.copied += args[0].nbytes
        elif name == "copy_":
            effect.stepped += args[0].nbytes
        return operator(*args, **kwargs)

    return counted


def _held(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()


def _large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


# --- what each technique is to do, against the same model without it


def data(ranks: list[Effect], without: Effect) -> None:
    """Each rank keeps half of what a whole batch leaves for the backward, and every gradient is sent once."""
    gradients = 4 * without.parameters
    for rank in ranks:
        assert rank.parameters == without.parameters
        assert rank.kept < 0.8 * without.kept
        assert gradients <= rank.moved[REDUCE] <= 1.05 * gradients + 4096


def shard(ranks: list[Effect], without: Effect) -> None:
    """Parameters and optimizer state lie on the ranks in parts; each part is gathered and reduced, not more."""
    assert sum(rank.state for rank in ranks) == without.state
    assert max(rank.state for rank in ranks) <= 1.2 * without.state / len(ranks)
    assert sum(rank.parameters for rank in ranks) == without.parameters
    assert max(rank.parameters for rank in ranks) <= 1.2 * without.parameters / len(ranks)
    for rank in ranks:
        assert 4 * without.parameters <= rank.moved[SCATTER] <= 1.1 * 4 * without.parameters
        assert rank.calls(GATHER) >= 1 and rank.moved[GATHER] >= rank.moved[SCATTER] / len(ranks)


def zero1(ranks: list[Effect], without: Effect) -> None:
    """The state is divided, a parameter's on one rank; parameters are not: each is sent by the rank that stepped it."""
    uneven = without.largest * without.state / without.parameters
    assert sum(rank.state for rank in ranks) == without.state
    assert max(rank.state for rank in ranks) <= without.state / len(ranks) + uneven
    assert min(rank.state for rank in ranks) <= without.state / 2
    for rank in ranks:
        assert rank.parameters == without.parameters
        assert 4 * without.parameters <= rank.moved[SEND] <= 1.05 * 4 * without.parameters + 4096


def again(ranks: list[Effect], without: Effect) -> None:
    """Operators run twice, and less is kept for the backward."""
    for rank in ranks:
        assert without.operators < rank.operators <= without.operators + 1.5 * sum(without.forward.values())
        assert rank.kept < without.kept


def hardly(ranks: list[Effect], without: Effect) -> None:
    """Where each block is one layer, which keeps its input and no more anyway, there is nothing to save."""
    for rank in ranks:
        assert without.operators <= rank.operators <= without.operators + sum(without.forward.values())
        assert rank.kept <= without.kept and rank.products == without.products


def selective(ranks: list[Effect], without: Effect) -> None:
    """Operators run twice, but not matrix products."""
    again(ranks, without)
    assert all(rank.products == without.products for rank in ranks)


def offload(ranks: list[Effect], without: Effect) -> None:
    """What would be kept has been copied away."""
    for rank in ranks:
        assert rank.kept < 0.25 * without.kept
        assert rank.copied >= 0.75 * without.kept


def accumulate(ranks: list[Effect], without: Effect) -> None:
    """Two microbatches run one after the other, each keeps half."""
    for rank in ranks:
        assert sum(rank.forward.values()) == 2 * sum(without.forward.values())
        assert rank.kept < 0.8 * without.kept


def bf16(ranks: list[Effect], without: Effect) -> None:
    """Matrix products are computed in bfloat16, most of them."""
    for rank in ranks:
        assert not without.dtypes["bfloat16"]
        assert rank.dtypes["bfloat16"] > rank.dtypes["float32"]


def state_away(ranks: list[Effect], without: Effect) -> None:
    """Around the step, all of the optimizer's state is written to the host; on a CPU device that is a copy as well."""
    for rank in ranks:
        assert rank.state == without.state and rank.parameters == without.parameters
        assert 4 * without.state <= rank.stepped - without.stepped <= 1.05 * 8 * without.state


def halved(ranks: list[Effect], without: Effect) -> None:
    """Every gradient is sent once, in two bytes instead of four."""
    gradients = 2 * without.parameters
    for rank in ranks:
        assert rank.parameters == without.parameters
        assert gradients <= rank.moved[REDUCE] <= 1.05 * gradients + 4096
