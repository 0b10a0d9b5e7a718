"""What a plan stores, computes, gathers and reduces in: the bytes that move, and numbers that are one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.parallel.apply import apply
from meshwise.parallel.precision import cast_batch, computing, gathered_narrow
from meshwise.parallel.technique import TORCH, Setup
from meshwise.spec.dtypes import dtypes_of
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.torch_compat.dispatch import intercept_operators, operator_name
from meshwise.torch_compat.tree import tensors_in
from meshwise.transfer import collectives
from tests.parallel.applied import apply_with, backward
from tests.parallel.zoo import ZOO, Transformer, batches, build
from tests.pool import CaseFailed

GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


def here() -> World:
    return World(rank=collectives.get_rank(), size=collectives.world_size())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_share(name: str) -> tuple[Tensor, Tensor]:
    world = here()
    (batch, target), *_ = batches(name, 1, torch.float32)
    return batch.chunk(world.size)[world.rank], target.chunk(world.size)[world.rank]


def forward(name: str, model: nn.Module, plan: Plan, share: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    with computing("cpu", plan.dtypes):
        batch, target = cast_batch(share, plan.dtypes)
        output = model(batch)
        return output, ZOO[name].score(output.float(), target.float() if target.is_floating_point() else target)


def moved(name: str, plan: Plan) -> tuple[dict[str, int], dict[str, Tensor], Tensor]:
    """Bytes that each kind of collective took in one step, the gradients, whole, and this rank's output."""
    model = build(name, torch.float32)
    applied = apply(model, plan, here())
    sizes: dict[str, int] = {}

    def seen(operator: Any, args: Any, kwargs: Any) -> Any:
        if operator_name(operator) in (GATHER, SCATTER, REDUCE):
            sent = (
                args[1]
                if operator_name(operator) == GATHER
                else args[1]
                if operator_name(operator) == SCATTER
                else args[0]
            )
            total = sum(t.nbytes for t in tensors_in(sent))
            sizes[operator_name(operator)] = sizes.get(operator_name(operator), 0) + total
        return operator(*args, **kwargs)

    for _ in range(2):  # the first backward of a data parallel run makes its reducer
        model.zero_grad()
        sizes.clear()
        with intercept_operators(seen):
            output, loss = forward(name, model, plan, own_share(name))
            backward(applied, loss)
    return sizes, {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}, output.detach()


def alone(name: str, plan: Plan) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients that the ranks have, averaged in float64, and this rank's output, without any plan laid on."""
    model = build(name, torch.float32)
    output, loss = forward(name, model, plan, own_share(name))
    loss.backward()
    held = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return {n: collectives.all_reduce_mean(g) for n, g in held.items()}, output.detach()


def against_alone(name: str, plan: Plan) -> tuple[dict[str, int], float, bool]:
    sizes, gradients, output = moved(name, plan)
    want, plain = alone(name, plan)
    assert gradients.keys() == want.keys()
    apart = max(float((gradients[n] - g).norm() / g.norm().clamp(min=1e-6)) for n, g in want.items())
    return sizes, apart, torch.equal(output, plain)


def computes_lstm(precision: str) -> bool:
    """Whether torch has an LSTM in it here: in float16 on no CPU, in bfloat16 on those with AVX-512 and others."""
    try:
        with torch.autocast("cpu", TORCH[precision]):
            nn.LSTM(1, 1)(torch.ones(2, 1, 1))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("transformer", "bf16"), ("mlp", "fp16"), ("lstm", "bf16")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("transformer", "fp16"), ("mlp", "bf16"), ("lstm", "fp16"))
        ),
    ],
)
def test_a_shard_gathers_weights_as_autocast_casts_them_and_computes_the_same_bits(
    name: str, precision: str, pool: Any
) -> None:
    if name == "lstm" and not computes_lstm(precision):
        with pytest.raises(CaseFailed, match="a trial of LSTM failed"):
            pool(2).run(moved, name, Plan(shard=2, precision=precision))
        return
    full = pool(2).run(moved, name, Plan(shard=2))[0][0]
    for sizes, apart, same in pool(2).run(against_alone, name, Plan(shard=2, precision=precision)):
        assert same, "the forward is not that of one device, bit for bit"
        assert apart < 1e-6
        assert sizes[GATHER] < 0.6 * full[GATHER] and sizes[SCATTER] == full[SCATTER]


@pytest.mark.parametrize(("plan", "kind"), [(Plan(shard=2), SCATTER), (Plan(data=2), REDUCE)], ids=repr)
def test_gradients_are_sent_in_what_the_plan_says(plan: Plan, kind: str, pool: Any) -> None:
    full = pool(2).run(moved, "transformer", plan)[0][0]
    narrow = Plan(data=plan.data, shard=plan.shard, grad_dtype="bf16")
    for sizes, apart, same in pool(2).run(against_alone, "transformer", narrow):
        assert sizes[kind] == full[kind] // 2
        assert same and 1e-4 < apart < 1e-2


@pytest.mark.parametrize("plan", [Plan(shard=2, param_dtype="bf16"), Plan(data=2, param_dtype="bf16")], ids=repr)
def test_parameters_are_stored_in_what_the_plan_says(plan: Plan, pool: Any) -> None:
    pool(2).run(stored, plan)


def stored(plan: Plan) -> None:
    model = build("mlp", torch.float32)
    applied = apply(model, plan, here())
    optimizer = torch.optim.Adam(model.parameters())
    backward(applied, forward("mlp", model, plan, own_share("mlp"))[1])
    optimizer.step()
    assert {t.dtype for p in model.parameters() for t in (p, p.grad) if t is not None} == {torch.bfloat16}
    kept = {t.dtype for state in optimizer.state.values() for t in state.values() if t.ndim > 0}
    assert kept == {torch.bfloat16}


def test_gradients_in_both_dtypes_add_up_over_microbatches_and_are_weighed(pool: Any) -> None:
    pool(2).run(accumulated)


def accumulated() -> None:
    plan = Plan(shard=2, precision="bf16")
    sides = []
    for under in (True, False):
        model = build("transformer", torch.float32)
        applied = apply(model, plan, here()) if under else Setup(model, plan, here())
        batch, target = own_share("transformer")
        for last, part in enumerate(zip(batch.chunk(2), target.chunk(2), strict=True)):
            loss = forward("transformer", model, plan, part)[1]
            factor = (lambda: torch.tensor(0.3)) if last else None
            backward(applied, loss, reduce=bool(last), factor=factor, whole=True)
        sides.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    for n, g in sides[1].items():
        torch.testing.assert_close(sides[0][n], collectives.all_reduce_mean(g), rtol=1e-5, atol=1e-7)


def test_only_what_autocast_casts_is_gathered_narrow() -> None:
    model = Transformer()
    names = {name for name, p in model.named_parameters() if id(p) in gathered_narrow(model)}
    assert names == {f"layers.{i}.{part}.weight" for i in range(3) for part in ("query", "out", "rise", "fall")}


# --- float16: the loss is scaled, and all ranks agree on what overflowed


def scaled_steps(plan: Plan, clip: bool) -> list[tuple[list[float], float, list[int]]]:
    """Four steps with Adam; in the second, the loss of the last rank overflows. What the parameters, the scale and the
    optimizer's counts are after each."""
    world, found = here(), []
    model = build("mlp", torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    applied = apply_with(model, plan, world, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(4):
        pieces = list(zip(*(t.chunk(plan.accumulate) for t in own_share("mlp")), strict=True))
        for piece in range(plan.accumulate):
            loss = forward("mlp", model, plan, pieces[piece])[1] / plan.accumulate
            if number == 1 and world.rank == world.size - 1 and piece == 0:
                loss = loss * float("inf")
            backward(applied, scaler.scale(loss), reduce=piece == plan.accumulate - 1)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps = [int(state["step"]) for state in optimizer.state.values()]
        found.append((torch.cat([whole(p).flatten() for p in model.parameters()]).tolist(), scaler.get_scale(), steps))
    return found


SCALED = [
    Plan(shard=2, precision="fp16"),
    Plan(shard=2, precision="fp16", accumulate=2),
    Plan(data=2, precision="fp16"),
    Plan(data=2, precision="fp16", zero1=True, accumulate=2),
]


@pytest.mark.parametrize(
    ("plan", "clip"),
    [
        pytest.param(plan, clip, marks=[pytest.mark.slow] * (clip == (number in (0, 3))))
        for number, plan in enumerate(SCALED)
        for clip in (False, True)
    ],
    ids=repr,
)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(plan: Plan, clip: bool, pool: Any) -> None:
    ranks = pool(2).run(scaled_steps, plan, clip)
    assert [step[:2] for step in ranks[0]] == [step[:2] for step in ranks[1]]
    values, scales, counts = zip(*ranks[1], strict=True)
    assert values[0] == values[1] != values[2] != values[3]
    assert scales == (2.0**10, 2.0**9, 2.0**9, 2.0**9)
    assert [set(c) for c in counts] == [{1}, {1}, {2}, {3}]
    want = torch.tensor(scaled_alone(clip))
    assert (torch.tensor(values[-1]) - want).norm() < 0.1 < 0.01 * len(want) ** 0.5  # a step of Adam's


def scaled_alone(clip: bool) -> list[float]:
    """Three good steps on one device, on the same samples, a half at a time."""
    plan = Plan(precision="fp16")
    model = build("mlp", torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch, target = batches("mlp", 1, torch.float32)[0]
    for _ in range(3):
        for part in zip(batch.chunk(2), target.chunk(2), strict=True):
            (forward("mlp", model, plan, part)[1] / 2).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


# --- what torch cannot compute


def halved_lstm() -> None:
    apply(build("lstm", torch.float32), Plan(data=2, precision="fp16"), here())


def test_float16_that_torch_lacks_is_refused_before_anything_starts(pool: Any) -> None:
    instead = "bf16" if computes_lstm("bf16") else "fp32"
    said = rf"compute_dtype='fp16': .* cannot compute fp16 on cpu: a trial of LSTM failed .* Use precision='{instead}'"
    with pytest.raises(PlanError, match=said):
        apply(build("lstm", torch.float32), Plan(precision="fp16"), World())
    with pytest.raises(CaseFailed, match="a trial of LSTM failed"):
        pool(2).run(halved_lstm)
    apply(build("lstm", torch.float32), Plan(precision=instead), World())


def test_an_operator_that_torch_lacks_is_told_with_what_to_write() -> None:
    with (
        pytest.raises(PlanError, match=r"cannot compute fp16 on cpu: .* Use precision='bf16'"),
        computing("cpu", dtypes_of("fp16")),
    ):
        raise RuntimeError("\"magic\" not implemented for 'Half'")
    with pytest.raises(RuntimeError, match="another"), computing("cpu", dtypes_of("fp16")):
        raise RuntimeError("another")
