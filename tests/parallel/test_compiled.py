"""Compile: blocks are compiled one by one, once for all of a class, under every plan, with one device's numbers.

The graphs are captured and run as they are (`aot_eager`): no compiler of the machine is needed.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.parallel import compiled
from meshwise.parallel.apply import apply
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.transfer import collectives
from tests.parallel.applied import backward
from tests.parallel.zoo import ZOO, batches, build

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own


@pytest.fixture(autouse=True)
def captured_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    yield
    torch._dynamo.reset()


def here() -> World:
    return World(rank=collectives.get_rank(), size=collectives.world_size())


def trained(plan: Plan, name: str = "transformer", backend: str = "aot_eager") -> tuple[list[Tensor], int, int]:
    """The parameters after two steps, how many graphs were captured, and how many times a layer's Python ran."""
    import torch._dynamo.utils

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.BACKEND = backend
    world = here()
    model = build(name)
    applied = apply(model, plan, world)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch, target in batches(name, 2):
        mine = (t.chunk(world.size)[world.rank] for t in (batch, target))
        loss = ZOO[name].score(model(next(mine)), next(mine))
        backward(applied, loss)
        optimizer.step()
        optimizer.zero_grad()
    found = [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]
    counters = torch._dynamo.utils.counters
    return found, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


PLANS = [
    Plan(shard=2, compile=True),
    Plan(data=2, compile=True, recompute="full"),
    Plan(shard=2, compile=True, recompute="full", offload=("activations",)),
]


@pytest.mark.parametrize("plan", [pytest.param(PLANS[0], marks=pytest.mark.slow), *PLANS[1:]], ids=repr)
def test_blocks_of_a_class_share_one_graph_and_compute_what_one_device_does(plan: Plan, pool: Any) -> None:
    want, graphs, _ = trained(Plan())
    assert graphs == 0
    for got, graphs, breaks in pool(2).run(trained, plan):
        assert graphs == 1 and breaks == 0
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() < 1e-9


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_the_machine_s_compiler_makes_code_that_computes_it_too(plan: Plan, pool: Any) -> None:
    want, _, _ = trained(Plan())
    for got, graphs, _ in pool(2).run(trained, plan, "transformer", "inductor", timeout=500):
        assert graphs == 1
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() < 1e-9


def distributed_compiled(how: str) -> tuple[bool, list[str], tuple[str, ...], float]:
    """A model that its author has compiled whole is laid out all the same, and stays the object that it is."""
    compiled.BACKEND = "aot_eager"
    model, plain = build("transformer"), build("transformer")
    keys = list(model.state_dict())
    given: Any = model
    if how == "wrapped":
        given = torch.compile(model, backend="aot_eager")
        keys = list(given.state_dict())
    else:
        model.compile(backend="aot_eager")
    applied = apply(given, Plan(shard=2), here())
    batch, target = batches("transformer", 1)[0]
    backward(applied, ZOO["transformer"].score(given(batch), target))
    ZOO["transformer"].score(plain(batch), target).backward()
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in given.parameters()]
    apart = max(float((a - p.grad).abs().max()) for a, p in zip(gradients, plain.parameters(), strict=True))  # type: ignore[operator]
    sharded = all(isinstance(p, DTensor) for p in given.parameters())
    return applied.model is given and sharded, [k for k in given.state_dict() if k not in keys], applied.notes, apart


@pytest.mark.parametrize("how", ["wrapped", pytest.param("in place", marks=pytest.mark.slow)])
def test_a_model_compiled_whole_is_compiled_block_by_block_and_it_says_so(how: str, pool: Any) -> None:
    for same, other_keys, notes, apart in pool(2).run(distributed_compiled, how):
        assert same and not other_keys and apart < 1e-9
        assert [note for note in notes if note.startswith("compile")] == [
            "compile: torch.compile of the whole model is removed, and each of 3 blocks is compiled separately: "
            "layers.0, layers.1, layers.2."
        ]


def test_a_deep_copy_of_a_compiled_model_computes_with_its_own_weights() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.ones(2, 3)
    compiled.compile_blocks(model)
    made = copy.deepcopy(model)
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
        assert model(x).any() and not made(x).any()


def test_what_another_technique_laid_into_a_part_is_left_out_of_the_graph(pool: Any) -> None:
    pool(2).run(with_batch_norm)


def with_batch_norm() -> None:
    compiled.BACKEND = "aot_eager"
    sides = []
    for plan in (Plan(data=2, compile=True), Plan(data=2)):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2)]
        model = nn.Sequential(*layers).double()
        applied = apply(model, plan, here(), samples=lambda: None)
        torch.manual_seed(here().rank)
        backward(applied, model(torch.randn(3, 4, dtype=torch.float64)).square().sum())
        sides.append([p.grad for p in model.parameters()])
    for a, b in zip(*sides, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_a_missing_compiler_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PlanError, match="on a CPU needs a C\\+\\+ compiler, but 'no-such-compiler' is not found"):
        apply(nn.Linear(2, 2), Plan(compile=True), World())


@pytest.mark.parametrize(
    ("device", "triton", "says"),
    [
        ("cpu", None, "compile=True on a CPU needs a C++ compiler, but 'no-such-compiler' is not found"),
        ("cuda:1", None, "compile=True on a GPU needs triton, which is missing"),
        ("cuda:1", "here", None),
        ("mps:0", None, None),
    ],
)
def test_what_the_compiler_needs_depends_on_the_device(
    device: str, triton: str | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: triton)
    if says is None:
        compiled.check_can_compile(device)
        return
    with pytest.raises(PlanError) as caught:
        compiled.check_can_compile(device)
    assert says in str(caught.value)
