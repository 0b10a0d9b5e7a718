"""Pipeline parallel: schedules, stages, what each holds, what is refused; and that it is what one device computes.

Of parallel/pipeline.py, parallel/holding.py, parallel/passing.py, parallel/schedule.py, training/job/step.py,
transfer/stages.py.

Tests parallel/holding.py, parallel/passing.py, parallel/schedule.py, training/job/step.py,
spec/plan.py, transfer/stages.py.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from meshwise.checker.one_device import one_device
from meshwise.checker.programs import watch_job
from meshwise.checker.proof import prove
from meshwise.checker.trace import CheckSpec
from meshwise.parallel.blocks import repeated_blocks
from meshwise.parallel.deferred import constructed, take_fakes
from meshwise.parallel.fits import check_for_scripts
from meshwise.parallel.load import load_weights
from meshwise.parallel.passing import Pass
from meshwise.parallel.pipeline import STAGES, Pipeline, costs_of
from meshwise.parallel.schedule import CHUNKS, Action, orders, stage_ranges
from meshwise.parallel.shard import Sharded
from meshwise.parallel.splits.axis import MeshAxis, SplitPart
from meshwise.parallel.splits.tensor import form_of
from meshwise.parallel.technique import Setup
from meshwise.spec.errors import PlanError, WorkerFailed
from meshwise.spec.plan import SCHEDULES, Plan
from meshwise.spec.plan_settings import plan_on
from meshwise.spec.world import World
from meshwise.torch_compat.sharding import local_of
from meshwise.training.job.job import Job
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.transfer import stages
from meshwise.transfer.stages import Pipe
from tests.parallel.test_experts import hold


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y = torch.relu_(self.a(self.norm(x)))
        return x + self.drop(self.b(y)), None


class Net(nn.Module):
    """Tied embedding and head, blocks that give a tuple, a frozen scale."""

    def __init__(self, blocks: int = 5, dropout: float = 0.1, skip: bool = False, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.scale = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        first = hidden = self.embed(x) * self.scale
        for number, block in enumerate(self.blocks):
            last = number == len(self.blocks) - 1
            (hidden, _) = block(hidden + first if self.skip and last else hidden)
            first = hidden if number == 0 else first
        found: Tensor = self.head(hidden)
        return found


class Looking(Net):
    """Reads values between its blocks, as I-BERT does for its ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(assert_numbers)


def assert_numbers(module: nn.Module, given: Any, found: tuple[Tensor, Tensor]) -> None:
    assert not found[0].isnan().any(), "not a number"


def sequences() -> tuple[Tensor]:
    return (torch.randint(16, (48, 6), generator=torch.Generator().manual_seed(3)),)


def token_mean(model: nn.Module, batch: tuple[Tensor]) -> tuple[Tensor, Tensor]:
    """Unequal counts of tokens in microbatches."""
    (x,) = batch
    each = functional.cross_entropy(model(x).transpose(1, 2), x.roll(-1, 1), reduction="none")
    counted = x > 4
    return (each * counted).sum() / counted.sum().clamp(min=1), counted.sum()


def job(**more: Any) -> Job:
    settings: dict[str, Any] = {
        "optimizer": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
        "data": sequences,
        "test": sequences,
        "batch_size": 12,
        "epochs": 2,
        "clip_norm": 0.5,
        "loss": token_mean,
        "model": Net,
    }
    return Job("net", **{**settings, **more})


def assert_equal(pool: Any, made: Job, plan: Plan) -> None:
    counts = hold(made, plan, pool)
    assert counts["gradients"] == 4 * (2 + 6 * 5 - 1) and counts["evaluation"] and counts["module outputs"] > 100


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_is_what_one_device_computes(schedule: str, pool: Any) -> None:
    assert_equal(pool, job(), Plan(pipeline=2, accumulate=4, schedule=schedule))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=2, pipeline=2, accumulate=3),
        Plan(data=2, pipeline=2, accumulate=4, schedule="interleaved"),
        Plan(pipeline=4, accumulate=5),
        Plan(pipeline=2, accumulate=3, recompute="full"),
    ],
    ids=repr,
)
def test_with_other_techniques(plan: Plan, pool: Any) -> None:
    assert_equal(pool, job(), plan)


LARGE = {"model": lambda: Net(width=40)}
"""Whose blocks are large enough to be sharded each by itself."""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shard_inside_stages(schedule: str, pool: Any) -> None:
    assert_equal(pool, job(**LARGE), Plan(shard=2, pipeline=2, accumulate=4, schedule=schedule))


def with_lost_gradients(made: Job, spec: CheckSpec, draws: Any) -> Any:
    """What torch 2.13 makes of a zero-bubble schedule (ScheduleZBVZeroBubble) with `fully_shard`: the blocks of the
    last stage have no gradient, and nothing says so."""

    def reduce_now(self: Sharded) -> None:
        reduced(self)
        pipe = stages.pipe()
        for name, p in self._parameters():
            if pipe is not None and pipe.rank == pipe.size - 1 and name.startswith("blocks."):
                p.grad = None

    reduced = Sharded.reduce_now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sharded, "reduce_now", reduce_now)
        return watch_job(made, spec, draws)


@pytest.mark.slow
def test_gradients_that_a_schedule_loses_are_named(pool: Any) -> None:
    made, spec = job(**LARGE), CheckSpec(Plan(shard=2, pipeline=2, accumulate=4))
    one = one_device(made, spec)
    proof = prove("net", spec, "4xcpu", one, pool(4).run(with_lost_gradients, made, spec, one.draws)[0].trace)
    assert not proof.equal and proof.cause is not None and proof.comparison.first is not None
    assert proof.comparison.first.name.startswith(("blocks.3", "blocks.4"))
    assert proof.cause.name == "missing reduction"


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(tensor=2, pipeline=2, accumulate=3),
        Plan(tensor=2, pipeline=2, accumulate=4, schedule="interleaved", recompute="full"),
        Plan(context=2, pipeline=2, accumulate=3),
        Plan(tensor=2, pipeline=2, accumulate=3, sequence=True),
        Plan(data=2, pipeline=2, accumulate=3, zero1=True),
        Plan(shard=2, pipeline=2, accumulate=3, recompute="full", precision="bf16", offload=("optimizer",)),
        Plan(shard=2, pipeline=2, accumulate=3, reshard=False, offload=("activations",)),
        Plan(data=2, shard=2, pipeline=2, accumulate=2),
        Plan(shard=2, tensor=2, pipeline=2, accumulate=2),
        Plan(data=2, tensor=2, pipeline=2, accumulate=3),
        Plan(shard=2, context=2, pipeline=2, accumulate=2, schedule="gpipe"),
        Plan(context=2, tensor=2, pipeline=2, accumulate=2),
    ],
    ids=repr,
)
def test_with_other_axes(plan: Plan, pool: Any) -> None:
    assert_equal(pool, job(**LARGE), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [Plan(shard=2, pipeline=2, accumulate=4), Plan(tensor=2, pipeline=2, accumulate=4)], ids=repr
)
def test_parts_of_stages_are_saved_and_loaded_whole(plan: Plan, pool: Any, tmp_path: Path) -> None:
    made, whole = job(model=lambda: Net(dropout=0.0, width=40)), sum(p.nbytes for p in Net(width=40).parameters())
    weights = {}
    for name, first, then in (
        ("one", Plan(accumulate=4), Plan(accumulate=4)),
        ("back", plan, Plan(accumulate=4)),
        ("there", Plan(accumulate=4), plan),
        ("again", plan, plan),
    ):
        folder = tmp_path / name
        folder.mkdir()
        for of, epochs, resume in ((first, 1, None), (then, 2, folder)):
            results = pool(of.devices).run(trained, made, of, folder, resume, epochs)
            assert results[0][0]["status"] == "finished"
            if of.devices > 1:
                assert max(held for _, held in results) < 0.4 * whole
        weights[name] = load_file(folder / "weights.safetensors")
    for name in ("back", "there", "again"):
        assert all(torch.allclose(weights["one"][key], tensor, atol=1e-5) for key, tensor in weights[name].items())


class Overflowing(Net):
    """Whose last block alone has gradients that overflow."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.blocks[-1].register_parameter("extra", nn.Parameter(torch.zeros(1)))
        self.blocks[-1].register_forward_hook(lambda block, given, out: (out[0] + block.extra * 1e38, None))


@pytest.mark.slow
def test_a_scaler_decides_for_all_stages(pool: Any, tmp_path: Path) -> None:
    """The gradients of one stage overflow: no stage steps."""
    made = job(model=Overflowing)
    plan = Plan(pipeline=2, accumulate=4, precision="fp16")
    assert pool(2).run(trained, made, plan, tmp_path, None, 1)[0][0]["status"] == "finished"
    torch.manual_seed(made.seed)
    before = Overflowing().state_dict()
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in load_file(tmp_path / "weights.safetensors").items()
    )


def trained(made: Job, plan: Plan, folder: Path, resume: Path | None, epochs: int) -> tuple[dict[str, Any], int]:
    """The facts of a run, and the bytes of its model's parameters on this rank at the end."""
    held: list[int] = []

    def look(end: Any) -> None:
        parts = [local_of(p).untyped_storage() for p in end.model.parameters()]
        own = {part.data_ptr(): part.nbytes() for part in parts}
        held.append(sum(own.values()))

    made = copy.copy(made)
    object.__setattr__(made, "callbacks", (look,))
    object.__setattr__(made, "epochs", epochs)
    facts = run_job(made, RunOptions(plan=plan, resume=resume), folder, send=lambda kind, **more: None)
    return facts, held[-1]


class Untied(Net):
    """Its embedding is used on the first stage alone, its head on the last."""

    def __init__(self) -> None:
        super().__init__(width=40, dropout=0.0)
        self.head = nn.Linear(40, 16, bias=False)


@pytest.mark.slow
def test_what_lies_outside_of_the_blocks_of_a_shard_is_reduced_and_saved(pool: Any, tmp_path: Path) -> None:
    """Gradients of two dtypes stopped the step, and the ranks of a stage gathered other tensors for the last save."""
    made, weights = job(model=Untied, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05)), []
    for plan in (Plan(accumulate=2, precision="bf16"), Plan(shard=2, pipeline=2, accumulate=2, precision="bf16")):
        folder = tmp_path / str(plan.devices)
        folder.mkdir()
        assert pool(plan.devices).run(trained, made, plan, folder, None, 1)[0][0]["status"] == "finished"
        weights.append(load_file(folder / "weights.safetensors"))
    assert all(torch.allclose(weights[0][key], tensor, atol=1e-3) for key, tensor in weights[1].items())


def test_a_run_goes_on_under_another_plan(pool: Any, tmp_path: Path) -> None:
    """Saved by stages, resumed on one device and by stages; the weights are those of one device all along."""
    made, plan = job(model=lambda: Net(dropout=0.0)), Plan(pipeline=2, accumulate=4)
    weights = {}
    for name, first, then in (("one", 1, 1), ("staged", 2, 2), ("back", 2, 1)):
        folder = tmp_path / name
        folder.mkdir()
        for size, epochs, resume in ((first, 1, None), (then, 2, folder)):
            of = plan if size == 2 else Plan(accumulate=4)
            results = pool(size).run(trained, made, of, folder, resume, epochs)
            assert results[0][0]["status"] == "finished"
            if size == 2:
                assert all(abs(a - b) < 1e-4 for a, b in zip(*(r[0]["losses"] for r in results), strict=True))
                assert max(held for _, held in results) < 0.75 * sum(p.nbytes for p in Net().parameters())
        weights[name] = load_file(folder / "weights.safetensors")
    for name in ("staged", "back"):
        assert all(torch.allclose(weights["one"][key], tensor, atol=1e-5) for key, tensor in weights[name].items())


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (job(model=lambda: Net(skip=True)), "reads more than the output of the block before it"),
        (job(model=Looking), r"before block blocks\.2 raised AssertionError: not a number(?s:.*) Use shard or tensor"),
        (
            job(loss=lambda m, b: token_mean(m, b)[0] + token_mean(m, b)[0]),
            r"in one loss, block blocks\.\d was called twice",
        ),
        (
            job(loss=lambda m, b: token_mean(m, b)[0] + sum(p.sum() for p in m.parameters())),
            "Its values are on another rank",
        ),
    ],
    ids=["skip", "looks", "twice", "penalty"],
)
@pytest.mark.slow
def test_what_cannot_be_cut_is_refused_by_name(made: Job, expected: str, processes: None) -> None:
    from meshwise.checker.check import check

    with pytest.raises((PlanError, WorkerFailed), match=expected):
        check(made, plan=Plan(pipeline=2, accumulate=4), rounding=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8])
def test_every_stage_takes_every_microbatch_once(schedule: str, ranks: int, microbatches: int) -> None:
    found = orders(schedule, ranks, microbatches)
    chunks = CHUNKS.get(schedule, 1)
    for rank, order in enumerate(found):
        assert len(set(order)) == len(order) == 2 * chunks * microbatches
        assert {action.stage % ranks for action in order} == {rank}
    kept = [max(sum(1 if a.forward else -1 for a in order[:n]) for n in range(1, len(order) + 1)) for order in found]
    if schedule == "1f1b":
        assert kept == [min(ranks - rank, microbatches) for rank in range(ranks)]
    if schedule == "gpipe":
        assert kept == [microbatches] * ranks


def test_1f1b_is_the_known_order() -> None:
    first, last = orders("1f1b", 2, 3)
    assert "".join("F" if action.forward else "B" for action in first) == "FFBFBB"
    assert last[:2] == (Action(True, 1, 0), Action(False, 1, 0))


def test_stages_are_as_equal_as_can_be() -> None:
    assert stage_ranges([1, 1, 1, 1], 2) == [(0, 2), (2, 4)]
    assert stage_ranges([9, 1, 1, 1], 2) == [(0, 1), (1, 4)]
    assert stage_ranges([1, 1, 8, 1], 3) == [(0, 2), (2, 3), (3, 4)]
    assert stage_ranges([1] * 3, 3) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "Use accumulate=2 or more"),
        (
            {"accumulate": 4, "shard": 2, "offload": ("parameters",)},
            "'parameters' is not supported yet. Use offload='opt",
        ),
        ({"accumulate": 4, "compile": True}, "pipeline=2 with compile=True is not supported yet. Remove compile"),
        ({"accumulate": 4, "schedule": "1f1"}, "1f1b"),
    ],
)
def test_plans_that_are_refused(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        Plan(pipeline=2, **fields)


def test_a_schedule_without_stages_is_refused() -> None:
    with pytest.raises(PlanError, match="no effect with pipeline=1"):
        Plan(schedule="gpipe")


def test_settings_may_come_in_any_order() -> None:
    assert plan_on(4, ["pipeline=2", "accumulate=4"]) == Plan(data=2, pipeline=2, accumulate=4)


def test_a_script_is_refused() -> None:
    with pytest.raises(PlanError, match=r"a script runs the loss itself. Write a Job"):
        check_for_scripts(Plan(pipeline=2, accumulate=4))


def dropping(**config: float) -> nn.Module:
    """A model of transformers with layers that are left out at random, as a part of another."""
    net: Any = Net(3)
    net.config = SimpleNamespace(encoder=SimpleNamespace(to_dict=dict, **config))
    return net  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "plan", "expected"),
    [
        (nn.Linear(2, 2), Plan(pipeline=2, accumulate=2), "has no repeated layers"),
        (Net(3), Plan(pipeline=4, accumulate=4), r"needs 4 blocks, but Net has 3 .blocks.0, .*Use pipeline=3"),
        (Net(3), Plan(pipeline=2, accumulate=4, schedule="interleaved"), "with 2 stages per rank needs 4 blocks"),
        (
            dropping(encoder_layerdrop=0.1),
            Plan(pipeline=2, accumulate=2),
            "encoder_layerdrop=0.1 skips layers at random",
        ),
    ],
)
def test_models_that_are_refused(model: nn.Module, plan: Plan, expected: str) -> None:
    assert STAGES.check_model is not None
    with pytest.raises(PlanError, match=expected):
        STAGES.check_model(Setup(model, plan, World()))


def test_a_deferred_model_gets_no_values_of_other_stages(tmp_path: Path) -> None:
    """Built and loaded, foreign blocks take the memory of one number a parameter, and the rest is what it was."""
    plain = Net(4)
    save_file({name: tensor.clone() for name, tensor in plain.state_dict().items()}, tmp_path / "model.safetensors")
    for loads in (False, True):
        model, note = constructed(lambda: Net(4))
        assert not note
        if loads:
            load_weights(model, tmp_path)
        stages.now_lacks(
            model, {name for name, _ in model.named_parameters() if name.startswith(("blocks.2", "blocks.3"))}
        )
        fill = take_fakes(model)
        assert fill is not None
        fill("cpu", "cpu")
        for name, p in model.named_parameters():
            foreign = name in stages.lacks(model)
            assert p.untyped_storage().nbytes() == (4 if foreign else p.nbytes)
            assert bool(p.isnan().all()) == foreign
            if loads and not foreign:
                assert torch.equal(p, plain.state_dict()[name])


def test_stages_are_cut_by_the_cost_of_blocks_that_a_job_gives() -> None:
    blocks = repeated_blocks(Net(4))
    assert stage_ranges(costs_of(blocks, None), 2) == [(0, 2), (2, 4)]
    assert stage_ranges(costs_of(blocks, lambda name, block: 9.0 if name == "blocks.0" else 1.0), 2) == [(0, 1), (1, 4)]
    with pytest.raises(
        PlanError, match=r"stage_cost.'blocks.0', block. returned nan. It must return a number of at least 0"
    ):
        costs_of(blocks, lambda name, block: float("nan"))
    pipe = Pipe(0, 2, None, None, None)
    note = Pipeline(Net(4), Plan(pipeline=2, accumulate=2), pipe, lambda name, block: 1.0).note(4000)
    assert "stage 1: blocks.2 to blocks.3 (2.3 KiB of parameters)" in note


def test_a_split_hidden_state_is_put_together_on_the_axis_of_the_stage_that_takes_it() -> None:
    sent = pickle.dumps(SplitPart(MeshAxis("an axis", 2, 1, None), 1, 8))
    own = MeshAxis("an axis", 2, 0, None)
    assert pickle.loads(sent).axis is own


def test_outside_of_a_pipeline_a_rank_lacks_nothing() -> None:
    assert stages.pipe() is None and not stages.lacks(Net()) and stages.counts()


def test_what_lies_between_two_stages_follows_the_first() -> None:
    """An encoder ends with dropout behind its last block, and the decoder's embedding has one: both run before the
    decoder's first block, and draw what comes after the encoder's."""
    reached: list[int] = []
    blocks = [(f"blocks.{n}", nn.Linear(1, 1)) for n in range(4)]
    now = Pass(Action(True, 1, 0), (2, 4), True, blocks)
    now.carried, now.received, now.forms = [7], "hidden", {0: "of block 0", 1: "of block 1"}
    stages.enter_own_layers(False)
    with stages.carried(lambda: None, reached.append):
        assert now.passed_by(0) == "of block 0" and reached == [] and not stages.counts()
        assert now.passed_by(1) == "hidden" and reached == [7] and stages.counts()
        now.enter(2)
    assert reached == [7]


def test_a_block_that_autograd_does_not_follow_is_refused() -> None:
    """As in Reformer, whose reversible layers have a backward of their own."""
    now = Pass(Action(True, 0, 0), (0, 1), False, [("blocks.0", nn.Linear(1, 1))])
    with torch.no_grad(), pytest.raises(PlanError, match=r"blocks.0 runs without gradients .* Use data or tensor"):
        now.enter(0)
    now.enter(0)


def test_what_lies_behind_the_last_block_of_a_stage_counts_on_the_next() -> None:
    blocks = [(f"blocks.{n}", nn.Linear(1, 1)) for n in range(2)]
    (_, last), (_, other) = blocks
    stages.enter_own_layers(True)
    now = Pass(Action(True, 0, 0), (0, 1), False, blocks)
    now.enter(0)
    assert stages.counts(other)
    now.leave(0, torch.zeros(1))
    assert stages.counts(last) and not stages.counts(other)
    stages.enter_own_layers(True)
    assert stages.counts(other)


class Tapering(Net):
    """Blocks of one class that give tensors of other shapes, and code between them that looks at shapes and writes."""

    def __init__(self) -> None:
        super().__init__(4)
        self.widen = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(width, 0.1) for width in (8, 16, 16, 16))
        self.head, self.norm = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for number, block in enumerate(self.blocks):
            hidden = block(self.widen(hidden) if number == 1 else hidden)[0].mul_(1.5)
            hidden = hidden.unflatten(-1, (2, 4)).flatten(-2) if number == 0 else hidden
            hidden = self.norm(hidden) if number == 1 else hidden  # between the stages
        found: Tensor = self.head(hidden)
        return found


def test_code_between_blocks_sees_the_shape_that_each_gives(pool: Any) -> None:
    spec, made = CheckSpec(Plan(pipeline=2, accumulate=4)), job(model=Tapering)
    one = one_device(made, spec)
    found = pool(2).run(watch_job, made, spec, one.draws)[0]
    proof = prove("net", spec, "2xcpu", one, found.trace, (), lambda again: one_device(made, again))
    assert proof.equal, (proof.comparison.first, proof.cause)


def test_stand_ins_for_earlier_blocks_are_one_tensor_until_the_model_writes_to_it():
    blocks = [(str(number), nn.Linear(2, 2)) for number in range(4)]
    now = Pass(Action(True, 1, 0), (3, 4), True, blocks)
    now.forms = dict.fromkeys(range(3), form_of(torch.zeros(5, 2)))
    first, second = now.passed_by(0), now.passed_by(1)
    assert first.isnan().all() and second.data_ptr() == first.data_ptr()
    first.zero_()
    third = now.passed_by(1)
    assert third.isnan().all() and not first.isnan().any()
