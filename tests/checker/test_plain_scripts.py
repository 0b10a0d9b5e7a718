"""`meshwise check` of a script of DDP or accelerate as it is: its ranks against one process, and its counts.

Tests checker/plain/script.py, torch_compat/loaders.py, training/autograd/loss_graph.py, checker/views/check_text.py,
checker/views/check_github.py, checker/plain/counts.py, checker/proof.py, checker/plain/judge.py,
checker/plain/neutral.py, checker/plain/rules.py, checker/plain/steps.py, checker/plain/values.py,
checker/plain/reads.py, checker/plain/record.py, checker/plain/schedule.py and checker/plain/watch.py.
The list that somebody planted who had not read them is tests/programs/others.
"""

from __future__ import annotations

import io
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from meshwise.checker.check import check_options
from meshwise.checker.loss_numbers import Number, Numbers
from meshwise.checker.options import CheckOptions
from meshwise.checker.plain.judge import judge
from meshwise.checker.plain.record import Follow, Pass, Record, Step
from meshwise.checker.plain.schedule import horizon_of, watch_ticks
from meshwise.checker.plain.watch import watch_plain
from meshwise.checker.proof import PlainProof
from meshwise.checker.views.check_dict import check_dict
from meshwise.checker.views.check_github import github_lines
from meshwise.checker.views.check_text import check_text
from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.training.autograd.loss_graph import scale_of

OTHERS = Path(__file__).parents[1] / "programs" / "others"
CASES = tomllib.loads((OTHERS / "CASES.toml").read_text(encoding="utf-8"))["case"]
GRADIENTS = {"weight": torch.tensor([1.0, 2.0]).double(), "bias": torch.tensor([0.5]).double()}
LINES = ("train.py:20", "train.py:21", "train.py:23")

SCRIPT = """
import contextlib, os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
torch.manual_seed(dist.get_rank())
x = torch.randn(83, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler, num_workers=2)
test = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).to(gpu)
model = DistributedDataParallel(model, device_ids=[gpu])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(9):
    sampler.set_epoch(epoch)
    for number, (a, b) in enumerate(loader):
        last = number % 2 == 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(a.cuda(gpu)), b.to(gpu))
            (loss / 2).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    counts = torch.zeros(2, device=gpu)
    with torch.no_grad():
        for a, b in test:
            counts += torch.tensor([(model(a.to(gpu)).argmax(1) == b.to(gpu)).sum(), len(b)])
    model.train()
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} batches {len(loader)} accuracy {counts[0] / counts[1]:.6f} of {counts[1]:.0f}")
        torch.save(model.state_dict(), "model.pt")
"""


def proof(folder: Path, text: str) -> PlainProof:
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    found = check_options(CheckOptions(str(script)))
    assert isinstance(found, PlainProof)
    return found


@pytest.mark.usefixtures("processes")
def test_a_script_that_names_gpus_is_checked_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal but for what is by design: batch norm, accumulation, clipping and dropout are one process's; what is wrong
    is the evaluation, which counts a padded sample."""
    monkeypatch.chdir(tmp_path)
    found = proof(tmp_path, SCRIPT)
    assert found.steps == 5
    assert found.largest < 1e-13
    assert not found.not_judged
    assert [(each.kind, each.wrong) for each in found.findings] == [
        ("samples read twice", False),
        ("batch size is per device", False),
        ("samples counted twice in the evaluation", True),
        ("batch norm per rank", False),
        ("gradients left over from an epoch", False),
        ("metric differs from one device's", True),
    ]
    assert found.findings[2].places == ("train.py:34", "train.py:16")
    assert not (tmp_path / "model.pt").exists(), "a check writes over nobody's files"
    assert check_dict(found)["verdict"] == "different"


@pytest.mark.usefixtures("processes")
def test_two_mistakes_of_a_script_are_named_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = SCRIPT.replace("    sampler.set_epoch(epoch)\n", "").replace("nn.BatchNorm1d(8), ", "")
    text = text.replace("b.to(gpu))\n            (", "b.to(gpu), torch.tensor([0.1, 0.9]))\n            (")
    found = {each.kind: each for each in proof(tmp_path, text).findings if each.wrong}
    assert found["set_epoch is missing"].places[0] == "train.py:21"
    assert found["mean over unequal counts"].places == ("train.py:24", "train.py:25")


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("case", [pytest.param(case, id=case["file"]) for case in CASES])
def test_what_somebody_else_planted_is_named(case: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    if case["wrapper"] == "accelerate":
        pytest.importorskip("accelerate")
    monkeypatch.chdir(OTHERS)
    found = check_options(CheckOptions(str(case["file"])))
    assert isinstance(found, PlainProof)
    assert found.equal == (case["expected"] != "wrong" or not any(each.wrong for each in found.findings))
    lines = {int(place.rpartition(":")[2]) for each in found.findings for place in each.places}
    assert case["expected"] == "clean" or lines & set(case["lines"])  # type: ignore[call-overload]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print(1)", "no torch optimizer made a step"),
        (
            "import torch\np = torch.nn.Linear(2, 1)\no = torch.optim.SGD(p.parameters(), 0.1)\n"
            "p(torch.ones(1, 2)).sum().backward()\no.step()",
            "the ranks train without DistributedDataParallel or accelerate",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        proof(tmp_path, text)


# The judge alone.


def step(**changes: object) -> Step:
    parameters = {name: torch.ones_like(gradient) for name, gradient in GRADIENTS.items()}
    made = Step(0, LINES, [{"lr": 0.1}], dict(GRADIENTS), parameters, losses=[1.0], scales=[1.0], ticks=1)
    return replace(made, **changes)  # type: ignore[arg-type]


def read(rank: int, ranks: int = 2, number: int = 0, size: int = 16, trained: bool = True) -> Pass:
    """A pass over every `ranks`-th of 16 samples, in batches of two, in another order each time."""
    order = [(index * 7 + number * 3) % size for index in range(rank, size, ranks)]
    batches = [order[at : at + 4 // ranks] for at in range(0, len(order), 4 // ranks)] if ranks < 3 else [order]
    return Pass(0, number, ("train.py:18",), frozenset(range(size)), batches, True, "x", [0, 1], trained, over=True)


def record(rank: int, ranks: int = 2, **changes: object) -> Record:
    made = Record(rank, [read(rank, ranks)], [step(), step()], wrapped=True)
    return replace(made, **changes)  # type: ignore[arg-type]


def found_in(many: list[Record], one: Record) -> dict[str, bool]:
    proof = judge("train.py", "2xcpu", many, one)
    assert not proof.equal or proof.largest <= 1e-9
    return {each.kind: each.wrong for each in proof.findings}


def test_what_is_right_is_equal() -> None:
    made = judge("train.py", "2xcpu", [record(0), record(1)], record(0, 1))
    assert made.equal and made.largest == 0 and made.steps == 2
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(check_text(made))
    assert console.export_text().startswith(
        "equal: 2 steps of 1 epoch on 2xcpu, against one process on the same samples"
    )


def test_a_finding_is_annotated_at_its_first_line() -> None:
    wrong = [record(rank, steps=[step(gradients=times(0.5))]) for rank in range(2)]
    (line,) = github_lines(judge("train.py", "2xcpu", wrong, record(0, 1)).findings)
    assert line.startswith("::error file=train.py,line=21,title=meshwise check, gradient times a number::step 1: every")


def times(number: float) -> dict[str, torch.Tensor]:
    return {name: gradient * number for name, gradient in GRADIENTS.items()}


def shares(rank: int, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """The gradients of a rank's own loss, whose mean over two ranks are GRADIENTS times the factors."""
    signs = {"weight": torch.tensor([0.5, -0.25]), "bias": torch.tensor([0.125])}
    return {name: factor * (g + (1 - 2 * rank) * signs[name]) for name, g in GRADIENTS.items()}


def mean(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: sum(each[name] for each in ranks) / len(ranks) for name in GRADIENTS}  # type: ignore[misc]


def loss(value: float) -> Numbers:
    return {("train.py:19", "mean", 1): Number(value, ())}


OTHER = {**GRADIENTS, "bias": torch.tensor([0.7]).double()}
FOUND: dict[str, tuple[Callable[[int], dict[str, object]], dict[str, object]]] = {
    "gradients not reduced": (lambda rank: {"steps": [step(gradients=times(1 + rank))]}, {}),
    "gradient times a number": (lambda rank: {"steps": [step(gradients=times(0.5))]}, {}),
    "mean over unequal counts": (lambda rank: {"steps": [step(gradients=OTHER, losses=(2.0 + rank,))]}, {}),
    "a hook before the reduction": (lambda rank: {"steps": [step(gradients=OTHER, hooks=("train.py:9",))]}, {}),
    "other gradients": (lambda rank: {"steps": [step(gradients=OTHER)]}, {}),
    "ranks diverged": (lambda rank: {"steps": [step(batches=[(0, 0, rank)])]}, {}),
    "momentum of one rank": (lambda rank: {"steps": [step(settings=[{"lr": 0.1, "momentum": 0.9 * rank}])]}, {}),
    "other start values": (lambda rank: {"steps": [step(starts=times(1 + rank))]}, {}),
    "changed outside of the step": (lambda rank: {"steps": [step(), step(starts=times(1 + rank))]}, {}),
    "an update of one rank": (
        lambda rank: {"steps": [step(parameters=times(1 + rank)), step(starts=times(1 + rank))]},
        {},
    ),
    "other state of a rank": (lambda rank: {"steps": [step(state={"teacher": torch.ones(2) + rank})]}, {}),
    "a parameter that no rank updates": (lambda rank: {"steps": [step(gradients={"weight": GRADIENTS["weight"]})]}, {}),
    "other optimizer step": (lambda rank: {"steps": [step(parameters=times(3))]}, {}),
    "changed in the reduction": (
        lambda rank: {"steps": [step(gradients=OTHER, own=[shares(rank)])]},
        {"steps": [step(own=[GRADIENTS])]},
    ),
    "a factor of one rank's loss": (
        lambda rank: {"steps": [step(gradients=mean([shares(0), shares(1, 0.1)]), own=[shares(rank, 0.1**rank)])]},
        {"steps": [step(own=[GRADIENTS])]},
    ),
    "a statistic of the rank's own batch": (
        lambda rank: {"steps": [step(gradients=OTHER, numbers=[loss(1.0 + rank)], rows=[2], losses=[1.0 + rank])]},
        {"steps": [step(numbers=[loss(1.7)], of_loss=[[*loss(1.7)]], losses=[1.7], own=[GRADIENTS])]},
    ),
    "clipping before the reduction": (lambda rank: {"steps": [step(clips=(("train.py:22", 1.0 + rank),))]}, {}),
    "loss divided by the accumulation twice": (lambda rank: {"steps": [step(scales=(0.25, 0.25))]}, {}),
    "set_epoch is missing": (
        lambda rank: {"passes": [read(rank), replace(read(rank), number=1)]},
        {"passes": [read(0, 1), read(0, 1, 1)]},
    ),
    "all ranks read the same samples": (lambda rank: {"passes": [read(0, 1)]}, {}),
    "samples never read": (lambda rank: {"passes": [read(0, 2)]}, {}),
    "samples left out of the evaluation": (lambda rank: {"passes": [read(rank, 3, trained=False)]}, {}),
    "samples counted twice in the evaluation": (
        lambda rank: {"passes": [replace(read(rank, trained=False), batches=[*read(rank).batches, [0]])]},
        {},
    ),
    "scheduler ticks at another pace": (
        lambda rank: {"horizon": 80, "ticked_at": ("train.py:24",), "passes": [read(rank, size=64)]},
        {"horizon": 40, "passes": [read(0, 1, size=64)]},
    ),
    "metric differs from one device's": (
        lambda rank: {"shown": [("train.py:30", "accuracy 0.50", False)]},
        {"shown": [("train.py:30", "accuracy 0.60", False)]},
    ),
    "learning rate of one rank": (lambda rank: {"plateau_metrics": [("train.py:33", 0.5 + rank / 100)]}, {}),
}


@pytest.mark.parametrize("kind", FOUND)
def test_each_mistake_has_its_name(kind: str) -> None:
    changes, alone = FOUND[kind]
    found = found_in([record(rank, **changes(rank)) for rank in range(2)], record(0, 1, **alone))
    assert found.get(kind) is True, found
    assert kind not in found_in([record(0), record(1)], record(0, 1))


@pytest.mark.parametrize("left", [1.0, 1.47])
def test_a_factor_is_that_before_the_clipping(left: float) -> None:
    clips = (("train.py:22", 1.0),)
    many = step(gradients=times(left), unclipped=times(2), clips=clips, by_trainer=True)
    ranks = [record(rank, steps=[many]) for rank in range(2)]
    (found,) = judge("train.py", "2xcpu", ranks, record(0, 1, steps=[step(unclipped=times(1), clips=clips)])).findings
    assert found.kind == "gradient times a number" and "is 2 times that of one process" in found.evidence
    assert "accepts_loss_kwargs = False" in found.instead
    (found,) = judge("train.py", "2xcpu", [replace(each, steps=[step(gradients=times(2))]) for each in ranks],
                     record(0, 1)).findings  # fmt: skip
    assert "DistributedDataParallel" in found.instead


def test_a_gradient_is_kept_as_it_was_before_the_clipping() -> None:
    def script() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(3, 2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    (made,) = watch_plain(script, 1, 0, None, World()).steps
    assert [float(g.norm()) for g in made.before_clipping.gradients.values()] == pytest.approx([18**0.5, 3])
    assert made.gradients["bias"].item() == pytest.approx(0.1 * 3 / 27**0.5, rel=1e-5) and not made.by_trainer


def test_a_state_is_that_of_the_first_forward_of_a_step() -> None:
    """Also where a loop takes what it reads by `next`, which raises StopIteration at the end of a loop that was cut."""

    class Counts(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += len(x)
            return super().forward(x)

    def script() -> None:
        model = Counts(2, 1)
        model.register_buffer("seen", torch.zeros(1).double())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = iter(torch.utils.data.DataLoader(torch.ones(32, 2), batch_size=4))
        while True:
            model(next(batches)).mean().backward()
            optimizer.step()

    seen = [step.state["seen"].item() for step in watch_plain(script, 3, 0, None, World()).steps]
    assert seen == [0.0, 4.0, 8.0]


def test_what_differs_by_design_is_not_wrong() -> None:
    padded = [
        record(r, passes=[replace(read(r, trained=False), batches=[*read(r).batches, [0]])],
               shown=[("train.py:30", "accuracy 0.50", False)])
        for r in range(2)
    ]  # fmt: skip
    one = record(0, 1, shown=[("train.py:30", "accuracy 0.50", False)])
    assert found_in(padded, one) == {"samples counted twice in the evaluation": False}, "cut by hand afterwards"
    grown = found_in(
        [record(0), record(1)], record(0, 1, passes=[replace(read(0, 1), batches=[[n] for n in range(16)])])
    )
    assert grown == {"batch size is per device": False}


def test_a_sampler_with_replacement_or_without_an_end_shares_nothing_out() -> None:
    again = [[0, 0, 1, 5], [2, 2, 3, 7]]
    many = [record(rank, passes=[replace(read(rank), batches=[again[rank][:2], again[rank][2:]])]) for rank in range(2)]
    assert "samples never read" in found_in(many, record(0, 1))
    assert found_in(many, record(0, 1, passes=[replace(read(0, 1), batches=again)])) == {}
    endless = [
        record(rank, passes=[replace(each.passes[0], endless=True, number=n, shuffles=True) for n in (0, 1)])
        for rank, each in enumerate(many)
    ]
    assert found_in(endless, record(0, 1)) == {}


def test_steps_of_ranks_by_themselves_are_not_judged_where_values_are_alike_again() -> None:
    """By value and parameter: what is never alike again was not averaged."""
    parted = {name: torch.zeros_like(gradient) for name, gradient in GRADIENTS.items()}

    def steps(rank: int, again: float) -> list[Step]:
        there = {"weight": parted["weight"], "bias": parted["bias"] + again * rank}
        return [step(gradients=times(1 + rank), starts=parted), step(gradients=times(1 + rank), starts=there)]

    proofs = [
        judge("train.py", "2xcpu", [record(rank, steps=steps(rank, again)) for rank in range(2)], record(0, 1))
        for again in (0.0, 1.0)
    ]
    assert proofs[0].verdict.value == "not judged" and "local steps between averages" in proofs[0].not_judged[0]
    assert [each.kind for each in proofs[1].findings] == ["gradients not reduced"] and proofs[1].largest > 0.1


def test_what_is_not_judged_is_never_equal() -> None:
    own = [record(rank, passes=[replace(read(rank), content=str(rank))]) for rank in range(2)]
    drawn = [record(rank, steps=[step(draws=True, gradients=OTHER)]) for rank in range(2)]
    unknown = [record(rank, passes=[replace(read(rank), samples=None)]) for rank in range(2)]
    for many in (own, drawn, unknown):
        made = judge("train.py", "2xcpu", many, record(0, 1))
        assert made.verdict.value == "not judged" and made.not_judged and not made.findings
    failed = judge("train.py", "2xcpu", [record(0), record(1)], Record(0, refused="it fails with"))
    assert failed.verdict.value == "not judged"


def test_one_process_reads_what_all_ranks_read() -> None:
    follow = Follow([record(0), record(1)])
    assert follow.unions(read(0, 1)) == [[read(0).batches[n], read(1).batches[n]] for n in (0, 1)]
    own = read(0, 1, number=5)
    assert follow.unions(own) is None
    assert follow.unions(replace(read(0, 1), samples=None, batches=[])) == [], "of an IterableDataset nothing is known"
    follow.unions(alone := replace(read(0, 1), batches=[[n] for n in range(16)]))
    assert alone.counted == len(read(0).batches), "len(loader) is that of the ranks"
    whole = Follow([record(r, passes=[replace(read(r, trained=False), given=[0, 1, 2, 3])]) for r in range(2)])
    assert whole.unions(read(0, 1)) == [[batch] for batch in read(0, 1).batches], (
        "an evaluation, as one process reads it"
    )
    whole.unions(alone := read(0, 1))
    assert alone.counted == 0, "or its own"
    cut = Follow([record(r, passes=[replace(read(0, trained=False), given=[0, 3])]) for r in range(2)])
    assert cut.unions(read(0, 1)) == [[read(0).batches[0]], [read(0).batches[3]]], "each sample once"


def test_the_scale_of_a_loss_and_the_length_of_a_schedule() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).mean()
    assert scale_of(loss) == 1
    assert scale_of(loss / 4 / 2) == 1 / 8
    assert scale_of(2 * loss * torch.tensor(3.0)) == 6
    optimizer = torch.optim.SGD([weight], 0.1)
    assert horizon_of(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)) == 50
    warmup, total = 4, 32
    assert horizon_of(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(n / warmup, total - n))) == 32
    assert horizon_of(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)) is None


@pytest.mark.parametrize(
    ("accuracy", "kind"), [("0.50", "number of one rank"), ("0.60", "metric differs from one device's")]
)
def test_a_loss_of_the_training_that_stands_beside_a_metric_is_of_one_rank(accuracy: str, kind: str) -> None:
    def side(rank: int, ranks: int, losses: tuple[float, ...], text: str) -> Record:
        steps = [step(losses=losses, scales=(0.5, 0.5)) for _ in range(2)]
        return record(rank, ranks, steps=steps, shown=[("train.py:30", text, False)])

    ranks = [side(rank, 2, (0.5, 0.7 + rank / 10), "loss 1.4000 acc 0.50") for rank in range(2)]
    found = found_in(ranks, side(0, 1, (0.5, 0.75), f"loss 1.5000 acc {accuracy}"))
    assert {name for name in found if name in ("number of one rank", "metric differs from one device's")} == {kind}


def test_the_loss_of_a_microbatch_that_no_step_takes_is_of_one_rank() -> None:
    """It stands with the losses of the next epoch's first step, or after the last step."""

    def found(losses: list[tuple[float, ...]], left: tuple[float, ...]) -> dict[str, bool]:
        def side(rank: int, ranks: int, more: float, text: str) -> Record:
            steps = [step(losses=tuple(n + more for n in each), scales=(0.5,) * len(each)) for each in losses]
            after = tuple(n + more for n in left)
            return record(rank, ranks, steps=steps, left=after, shown=[("train.py:30", text, False)])

        ranks = [side(rank, 2, rank / 10, "loss 1.4000 acc 0.50") for rank in range(2)]
        return found_in(ranks, side(0, 1, 0.05, "loss 1.5000 acc 0.50"))

    for number in (found([(0.5, 0.6), (0.7, 0.5, 0.6)], ()), found([(0.5, 0.6)], (0.7,))):
        assert number["number of one rank"] is False and "metric differs from one device's" not in number


def test_losses_divided_by_the_length_of_a_loader_that_was_not_read_whole_are_of_one_rank() -> None:
    """As in `total += loss.item() * accumulate` and `total / len(loader)`: a check reads some of its batches."""

    def side(rank: int, ranks: int, losses: tuple[float, ...], text: str) -> Record:
        steps = [step(losses=losses, scales=(0.5, 0.5)) for _ in range(2)]
        passes = [replace(read(rank, ranks), batches=read(rank, ranks).batches * 3)]
        return record(rank, ranks, passes=passes, steps=steps, shown=[("train.py:30", text, False)])

    ranks = [side(rank, 2, (0.5, 0.7 + rank / 10), "loss 0.4000") for rank in range(2)]
    assert found_in(ranks, side(0, 1, (0.5, 0.75), "loss 0.4167"))["number of one rank"] is False
    assert found_in(ranks, side(0, 1, (0.5, 0.75), "loss 0.4267"))["metric differs from one device's"]


def test_gradients_that_an_epoch_leaves_to_the_next_are_reported() -> None:
    steps = [step(scales=(0.5,) * number) for number in (2, 2, 3, 2)]
    passes = [read(0), read(0, number=1)]
    found = found_in([record(rank, steps=steps, passes=passes) for rank in range(2)], record(0, 1, steps=steps))
    assert found["gradients left over from an epoch"] is False
    even = [record(rank, steps=steps[:2] * 2, passes=passes) for rank in range(2)]
    assert "gradients left over from an epoch" not in found_in(even, record(0, 1, steps=steps[:2] * 2))


def test_a_loss_divided_twice_is_found_beside_one_that_no_step_takes() -> None:
    steps = [step(scales=(0.25,) * number) for number in (2, 3)]
    assert found_in([record(rank, steps=steps) for rank in range(2)], record(0, 1, steps=steps))[
        "loss divided by the accumulation twice"
    ]


@pytest.mark.parametrize(("printed", "alarms"), [("2.799e-03", False), ("3.100e-03", True)])
def test_a_learning_rate_that_is_printed_is_no_metric(printed: str, alarms: bool) -> None:
    """One process, which takes rank 0's rates, went on from these by the length of its own loader."""

    def side(rank: int, ranks: int, rate: float, text: str) -> Record:
        steps = [step(scales=(1.0,)) for _ in range(2)]
        return record(rank, ranks, steps=steps, shown=[("train.py:30", text, False)], rates={rate})

    ranks = [side(rank, 2, 0.0027989, f"acc 0.50 lr {printed}") for rank in range(2)]
    found = found_in(ranks, side(0, 1, 0.0028861, "acc 0.50 lr 2.886e-03"))
    assert ("metric differs from one device's" in found) == alarms and "number of one rank" not in found


def test_a_number_that_is_another_when_one_process_runs_again_is_measured() -> None:
    """A time beside a loss of the training or a metric; what is a time by its words needs no other run."""

    def side(text: str, line: str = "train.py:30") -> list[tuple[str, str, bool]]:
        return [("train.py:29", "accuracy 0.5", False), (line, text, False)]

    ranks, runs = [record(rank, shown=side("2.0000 in 17.52")) for rank in range(2)], []

    def found(one: str, again: str) -> list[str]:
        def repeat() -> list[Record]:
            runs.append(again)
            return [record(0, 1, shown=side(again))]

        made = judge("train.py", "2xcpu", ranks, record(0, 1, shown=side(one)), repeat)
        return [each.kind for each in made.findings]

    assert found("2.0000 in 23.81", "2.0000 in 23.92") == [] and len(runs) == 1
    assert found("2.1000 in 23.81", "2.1000 in 23.92") == ["metric differs from one device's"]
    ranks = [record(rank, shown=side("2.0000 in 17.52s")) for rank in range(2)]
    assert found("2.0000 in 23.81s", "") == [] and len(runs) == 2


def test_ranks_that_step_at_other_rates_are_named_and_a_schedule_that_was_not_reached_is_not_judged() -> None:
    apart = [record(rank, steps=[step(settings=[{"lr": 0.1 + rank}])]) for rank in range(2)]
    assert found_in(apart, record(0, 1))["learning rate of one rank"]
    ranks = [record(rank, schedules=["train.py:15"]) for rank in range(2)]
    assert judge("train.py", "2xcpu", ranks, record(0, 1)).not_judged == (
        "the schedule of train.py:15: its step() was not called.",
    )
    ticked = [replace(rank, ticked_at=("train.py:20", "train.py:15")) for rank in ranks]
    assert judge("train.py", "2xcpu", ticked, record(0, 1)).equal


def test_what_a_plateau_is_told_is_kept() -> None:
    seen = record(0)
    ends = watch_ticks(seen)
    try:
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        assert len(seen.schedules) == 1 and not seen.ticked_at
        plateau.step(0.5)
        plateau.step(metrics=torch.tensor(0.25))
    finally:
        for end in ends:
            end()
    assert [number for _, number in seen.plateau_metrics] == [0.5, 0.25] and seen.ticks == 2


def test_an_evaluation_counts_each_sample_once_by_what_its_library_has() -> None:
    padded = [
        record(rank, passes=[replace(read(rank, trained=False), batches=[*read(rank).batches, [0]])], accelerate=by)
        for by in (False, True)
        for rank in range(2)
    ]
    advice = [judge("train.py", "2xcpu", many, record(0, 1)).findings[0].instead for many in (padded[:2], padded[2:])]
    assert "all_reduce" in advice[0] and "gather_for_metrics" not in advice[0] and "gather_for_metrics" in advice[1]


def test_an_evaluation_with_batch_norm_is_told_to_broadcast_its_statistics() -> None:
    """`model.module` leaves out what the wrapper does before each forward."""
    padded = replace(read(0, trained=False), batches=[*read(0).batches, [0]])
    ranks = [record(rank, passes=[padded], norms=("BatchNorm1d",)) for rank in range(2)]
    found = judge("train.py", "2xcpu", ranks, record(0, 1)).findings
    assert "dist.broadcast(b, 0)" in next(each.instead for each in found if "twice" in each.kind)


@pytest.mark.parametrize("own", [False, True])
def test_a_metric_of_other_statistics_of_batch_norm_says_so(own: bool) -> None:
    ranks = [
        record(rank, shown=[("train.py:30", "accuracy 0.50", False)], evaluated=[1.5, 2.0 + own * rank])
        for rank in range(2)
    ]
    (found,) = judge("train.py", "2xcpu", ranks, record(0, 1, shown=[("train.py:30", "accuracy 0.60", False)])).findings
    assert found.kind == "metric differs from one device's" and "Sum over all ranks' samples" in found.instead
    assert ("dist.broadcast" in found.instead) == ("statistics of batch norm" in found.evidence) == own


def test_the_statistics_of_an_evaluation_are_kept_where_they_are_others() -> None:
    def script() -> None:
        model = torch.nn.BatchNorm1d(2)
        for _ in range(2):
            model.train()(torch.ones(3, 2))
            for _ in range(3):
                model.eval()(torch.ones(3, 2))

    assert watch_plain(script, 1, 0, None, World()).evaluated == pytest.approx([0.1 * 2**0.5, 0.19 * 2**0.5])


def test_a_schedule_of_whole_accumulations_is_of_epochs() -> None:
    def side(rank: int, ranks: int, batches: int) -> Record:
        passes = [replace(read(rank, ranks), batches=[[0]] * batches)]
        return record(
            rank, ranks, passes=passes, horizon=36, steps=[step(scales=(0.5, 0.5))] * 3, ticked_at=("a.py:1",)
        )

    assert found_in([side(rank, 2, 13) for rank in range(2)], side(0, 1, 25))["scheduler ticks at another pace"]


def test_a_schedule_that_ends_with_a_trainer_of_max_steps_is_at_one_pace() -> None:
    def pace(own: int, alone: int) -> dict[str, bool]:
        def side(rank: int, ranks: int, length: int) -> Record:
            passes = [replace(read(rank, ranks), batches=[[0]] * (20 // ranks))]
            return record(rank, ranks, passes=passes, horizon=40, length=length, ticked_at=("train.py:1",))

        return found_in([side(rank, 2, own) for rank in range(2)], side(0, 1, alone))

    assert "scheduler ticks at another pace" not in pace(40, 40)
    assert pace(20, 40)["scheduler ticks at another pace"]


def test_the_steps_of_a_training_are_those_of_the_trainer_that_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    trainer = SimpleNamespace(state=SimpleNamespace(max_steps=40), ticks=torch.optim.lr_scheduler.StepLR(optimizer, 40))
    found = dict[str, Any]()
    source = "def tick(self):\n    self.ticks.optimizer.step()\n    self.ticks.step()\n"
    exec(compile(source, "/lib/transformers/trainer.py", "exec"), found)
    seen = record(0)
    ends = watch_ticks(seen)
    try:
        found["tick"](trainer)
    finally:
        for end in ends:
            end()
    assert (seen.length, seen.horizon) == (40, 40)
