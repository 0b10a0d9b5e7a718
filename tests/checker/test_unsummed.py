"""A loop that evaluates without mw.sum is found, with its line; loops that mean something else are left alone.

Each case is a small program on two devices. Of a mistake, the loop that must be named is marked `# here`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.checker.unsummed import UnsummedLoops
from meshwise.torch_compat import compiling
from meshwise.training.engine.loops import LoopRead
from meshwise.training.process.session import default_engine, program_ends


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


class Program:
    """What a small program has before its loops."""

    def __init__(self, plan: mw.Plan | None = None) -> None:
        torch.manual_seed(0)
        x = torch.randn(24, 6)
        y = (x.sum(1) > 0).long()
        self.model, self.teacher = Net(), Net().eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
        self.held_out = DataLoader(TensorDataset(x, y), batch_size=6)
        self.other = DataLoader(TensorDataset(x, y), batch_size=6)
        self.one_batch = DataLoader(TensorDataset(x, y), batch_size=24)
        parts = (self.model, self.optimizer, self.loader, self.held_out, self.other, self.one_batch)
        parts = mw.distribute(*parts, plan=plan, view="rank")
        self.model, self.optimizer, self.loader, self.held_out, self.other, self.one_batch = parts

    def train(self) -> None:
        self.model.train()
        for x, y in self.loader:
            self.step(x, y)

    def step(self, x: Tensor, y: Tensor) -> None:
        mw.backward(F.cross_entropy(self.model(x), y))
        self.optimizer.step()
        self.optimizer.zero_grad()


Case = Callable[[Program], object]
MISTAKES: list[Case] = []
RIGHT: list[Case] = []


def mistake(case: Case) -> Case:
    MISTAKES.append(case)
    return case


def right(case: Case) -> Case:
    RIGHT.append(case)
    return case


# ---- Mistakes --------------------------------------------------------------------------------------------------------


@mistake
def accuracy(p: Program) -> None:
    for _ in range(2):
        p.train()
        p.model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in p.held_out:  # here
                correct += (p.model(x).argmax(1) == y).sum().item()


@mistake
def sum_of_losses_on_the_device(p: Program) -> None:
    p.train()
    total = torch.zeros(())
    for x, y in p.held_out:  # here
        with torch.no_grad():
            output = p.model(x)
            total += F.cross_entropy(output, y, reduction="sum")
    p.train()


@mistake
def best_checkpoint(p: Program) -> None:
    best = 0.0
    for _ in range(2):
        p.train()
        right = sum(int((p.model(x).argmax(1) == y).sum()) for x, y in p.held_out)  # here
        if right > best:
            mw.save(p.model.state_dict(), "best.pt")


def best_checkpoint_under_shard(p: Program) -> None:
    p.train()
    p.model.eval()
    with torch.no_grad():
        right = sum(int((p.model(x).argmax(1) == y).sum()) for x, y in p.held_out)  # here
    if right >= 0:
        mw.save(p.model.state_dict(), "best.pt")
    p.train()


@mistake
def list_of_predictions(p: Program) -> None:
    p.train()
    found = [p.model(x) for x, _ in p.held_out]  # here
    torch.cat(found).argmax(1).tolist()


@mistake
def validation_inside_the_training_loop(p: Program) -> None:
    for number, (x, y) in enumerate(p.loader):
        p.step(x, y)
        if number % 2 == 0:
            for v, w in p.held_out:  # here
                F.cross_entropy(p.model(v), w).item()


@mistake
def validation_in_a_function(p: Program) -> None:
    def validate(model: nn.Module, loader: Iterable[Any]) -> float:
        model.eval()
        losses = []
        for x, y in loader:  # here
            losses.append(F.cross_entropy(model(x), y).item())
        return sum(losses) / len(losses)

    p.train()
    validate(p.model, p.held_out)
    p.train()


def one_loop(p: Program, loader: Iterable[Any], train: bool) -> int:
    right = 0
    p.model.train(train)
    for x, y in loader:  # of training, and of validation
        right += int((p.model(x).argmax(1) == y).sum())
        if train:
            p.step(x, y)
    return right


@mistake
def one_function_for_training_and_validation(p: Program) -> None:
    one_loop(p, p.loader, True)
    one_loop(p, p.held_out, False)


@mistake
def enumerate_with_a_limit(p: Program) -> None:
    p.train()
    for number, (x, y) in enumerate(p.held_out):  # here
        if number == 2:
            break
        (p.model(x).argmax(1) == y).sum().item()


@mistake
def two_loaders_in_a_zip(p: Program) -> None:
    for (x, _), (v, _) in zip(p.held_out, p.other, strict=True):  # here
        (p.model(x) - p.model(v)).norm().item()


@mistake
def a_progress_bar(p: Program) -> None:
    bar: dict[str, Any] = {}
    library = "def bar(loader):\n    for batch in loader:\n        yield batch\n"
    exec(compile(library, "/usr/lib/python3/site-packages/bar/std.py", "exec"), bar)
    for x, y in bar["bar"](p.held_out):  # here
        (p.model(x).argmax(1) == y).sum().item()


@mistake
def a_test_at_the_end_of_the_program(p: Program) -> None:
    p.train()
    for x, y in p.one_batch:  # here
        (p.model(x).argmax(1) == y).sum().item()


@mistake
def another_loop_is_summed(p: Program) -> None:
    p.train()
    correct = sum(int((p.model(x).argmax(1) == y).sum()) for x, y in p.held_out)  # here
    for x, y in p.other:
        correct += mw.sum(int((p.model(x).argmax(1) == y).sum()))


@mistake
def a_part_of_the_model(p: Program) -> None:
    assert isinstance(p.model, Net)
    for x, _ in p.held_out:  # here
        p.model.encode(x).mean().item()


@mistake
def predictions_of_a_program_that_trains_nothing(p: Program) -> None:
    found = [p.model(x) for x, _ in p.held_out]  # here
    torch.cat(found).argmax(1).tolist()


# ---- What must not be said -------------------------------------------------------------------------------------------


@right
def sum_inside(p: Program) -> None:
    p.train()
    correct = 0
    for x, y in p.held_out:
        correct += mw.sum(int((p.model(x).argmax(1) == y).sum()))
    p.train()


@right
def sum_after(p: Program) -> None:
    for _ in range(2):
        p.train()
        correct = sum(int((p.model(x).argmax(1) == y).sum()) for x, y in p.held_out)
        mw.sum(correct)


@right
def sum_after_several_loaders(p: Program) -> None:
    p.train()
    found = []
    for loader in (p.held_out, p.other):
        found.append(torch.stack([(p.model(x).argmax(1) == y).sum() for x, y in loader]).sum())
    mw.sum(torch.stack(found))
    p.train()


@right
def one_function_for_training_and_validation_that_is_summed(p: Program) -> None:
    for _ in range(2):
        one_loop(p, p.loader, True)
        mw.sum(one_loop(p, p.held_out, False))


@right
def mean_after(p: Program) -> None:
    p.train()
    losses = [F.cross_entropy(p.model(x), y).item() for x, y in p.held_out]
    mw.mean(sum(losses) / len(losses))
    p.train()


@right
def predictions_are_gathered(p: Program) -> None:
    p.train()
    found = [p.model(x) for x, _ in p.held_out]
    mw.gather_samples(torch.cat(found))


@right
def all_reduce_after(p: Program) -> None:
    p.train()
    correct = torch.zeros(())
    for x, y in p.held_out:
        correct += (p.model(x).argmax(1) == y).sum()
    dist.all_reduce(correct)
    p.train()


@right
def all_reduce_inside(p: Program) -> None:
    p.train()
    for x, y in p.held_out:
        correct = (p.model(x).argmax(1) == y).sum()
        dist.all_reduce(correct)
    p.train()


@right
def objects_are_gathered(p: Program) -> None:
    found = [p.model(x).argmax(1).tolist() for x, _ in p.held_out]
    dist.all_gather_object([None] * 2, found)
    p.train()


@right
def a_metric_that_syncs_at_compute(p: Program) -> None:
    class Accuracy(nn.Module):
        correct = torch.zeros(())

        def forward(self, output: Tensor, y: Tensor) -> None:
            self.correct = self.correct + (output.argmax(1) == y).sum()

        def compute(self) -> Tensor:
            gathered = [torch.zeros(()) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, self.correct)
            return torch.stack(gathered).sum()

    p.train()
    metric = Accuracy()
    for x, y in p.held_out:
        metric(p.model(x), y)
    metric.compute()
    p.train()


@right
def update_bn(p: Program) -> None:
    p.train()
    average = torch.optim.swa_utils.AveragedModel(p.model)
    mw.distribute(average, view="rank")
    torch.optim.swa_utils.update_bn(p.held_out, average)
    torch.optim.swa_utils.update_bn(p.held_out, p.model)


@right
def mean_and_deviation_of_the_data(p: Program) -> None:
    total, squares = torch.zeros(6), torch.zeros(6)
    for x, _ in p.held_out:
        total += x.sum(0)
        squares += (x * x).sum(0)
    print(total.tolist(), squares.tolist())
    p.train()


@right
def counts_of_labels_between_two_trainings(p: Program) -> None:
    p.train()
    p.model.eval()
    with torch.no_grad():
        counts = sum(int(y.sum()) for _, y in p.held_out)
    print(counts)
    p.train()


@right
def a_look_at_one_batch(p: Program) -> None:
    p.train()
    for x, _ in p.held_out:
        print(p.model(x).shape)
        break
    p.train()


@right
def a_warm_up_that_breaks(p: Program) -> None:
    for number, (x, y) in enumerate(p.held_out):
        F.cross_entropy(p.model(x), y)
        if number == 2:
            break
    p.train()


@right
def outputs_that_training_uses(p: Program) -> None:
    mw.distribute(p.teacher, view="rank")
    with torch.no_grad():
        kept = [p.teacher(x).flatten(1) for x, _ in p.held_out]
    for (x, _), wanted in zip(p.held_out, kept, strict=True):
        mw.backward(F.mse_loss(p.model(x), wanted))
        p.optimizer.step()
        p.optimizer.zero_grad()


@right
def outputs_of_a_teacher_that_is_not_distributed(p: Program) -> None:
    for x, _ in p.held_out:
        print(p.teacher(x).mean().item())
    p.train()


@right
def two_losses_of_two_loaders(p: Program) -> None:
    for (x, y), (v, w) in zip(p.held_out, p.other, strict=True):
        mw.backward(F.cross_entropy(p.model(x), y) + F.cross_entropy(p.model(v), w))
        p.optimizer.step()
        p.optimizer.zero_grad()


@right
def a_copy_of_the_model_has_no_hooks(p: Program) -> None:
    for number, (x, y) in enumerate(p.loader):
        p.step(x, y)
        if number == 0:
            best = copy.deepcopy(p.model)
            assert not any(module._forward_hooks for module in best.modules())


def said(case: Case, folder: Path, plan: mw.Plan | None = None) -> list[str]:
    """The loops that are found in a program, to its end."""
    engine, found = default_engine(), list[str]()
    if engine.world.size > 1:
        engine.events.listen(UnsummedLoops(engine, found.append), batches=2, whole=())
    program = Program(plan)
    with contextlib.chdir(folder):
        case(program)
    program_ends()
    assert not module._global_forward_hooks
    return list(dict.fromkeys(found))


def line_of(case: Case) -> int:
    lines, first = inspect.getsourcelines(one_loop if case is one_function_for_training_and_validation else case)
    marks = ("# here\n", "# of training, and of validation\n")
    return first + next(number for number, line in enumerate(lines) if line.endswith(marks))


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.__name__)
def test_is_said_with_its_line(case: Case, pool: Any, tmp_path: Path) -> None:
    for notes in pool(2).run(said, case, tmp_path):
        (text,) = notes
        assert text.endswith(f"test_unsummed.py:{line_of(case)}")


def test_the_state_that_is_gathered_to_be_saved_reduces_no_figure(pool: Any, tmp_path: Path) -> None:
    case = best_checkpoint_under_shard
    for notes in pool(2).run(said, case, tmp_path, mw.Plan(shard=2)):
        (text,) = notes
        assert f"test_unsummed.py:{line_of(case)}" in text


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_is_not_said(case: Case, pool: Any, tmp_path: Path) -> None:
    assert pool(2).run(said, case, tmp_path) == [[], []]


def test_what_is_reduced_by_the_program_is_known_under_shard(pool: Any, tmp_path: Path) -> None:
    assert pool(2).run(said, all_reduce_after, tmp_path, mw.Plan(shard=2)) == [[], []]


def test_on_one_device_every_figure_is_whole(tmp_path: Path) -> None:
    assert said(accuracy, tmp_path) == []


@pytest.mark.parametrize("gradients", [True, False])
def test_compiled_models_get_no_hooks(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook would have them compiled anew: a loop runs a model when gradients are off."""
    monkeypatch.setattr(compiling, "is_used", lambda: True)
    told: list[str] = []
    program = SimpleNamespace(models=[Net()], backwards=0, began=0)
    engine: Any = SimpleNamespace(program=program)
    loops, loop = UnsummedLoops(engine, told.append), LoopRead()
    with torch.set_grad_enabled(gradients):
        loops.batch_asked(loop)
        assert not module._global_forward_hooks
        loop.over = True
        loops.loop_ends(loop)
    loops.evaluations_end()
    assert len(told) == (0 if gradients else 1)
