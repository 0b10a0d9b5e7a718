"""A program that uses none of our verbs is recorded from outside, and computes what it computes without us.

With torch_compat/program_calls.py, torch_compat/collective_calls.py and reports/advice.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.records import folder as names
from meshwise.reports import advice
from meshwise.reports.analyse import report_of
from meshwise.reports.read import read_timeline
from meshwise.reports.recorder import current
from meshwise.reports.run_report import Report
from meshwise.reports.spans import KINDS, Timeline
from meshwise.spec.world import World
from meshwise.torch_compat import program_calls
from meshwise.torch_compat.collective_calls import Call
from meshwise.training.process.session import end_sessions
from meshwise.training.recording import plain_program
from meshwise.workers import heartbeat, verb_log
from meshwise.workers.environment import RUN_FOLDER
from meshwise.workers.gate import StepGate
from meshwise.workers.join import rank_context

Program = Callable[[], Any]


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    end_sessions()
    names.begin_session(tmp_path, 0.0, job="train.py", world=1)
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path))
    yield tmp_path
    if (recording := plain_program.end()) is not None:
        recording.close()
    end_sessions()


def recorded(program: Program, folder: Path) -> tuple[Any, Timeline, Report]:
    """What the program gives, its timeline and its report."""
    plain_program.begin(lambda text: None)
    result = program()
    recording = plain_program.end()
    assert recording is not None
    recording.close()
    timeline = read_timeline(folder)
    return result, timeline, report_of(timeline, str(folder))


def spans(timeline: Timeline) -> list[tuple[int, str]]:
    """The step and kind of each span, in their order; neighbours that are alike once."""
    found = [(int(span["step"]), KINDS[span["kind"]]) for span in timeline.spans]
    return [span for at, span in enumerate(found) if at == 0 or span != found[at - 1]]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def loader(batches: int, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(batches * 2, 4), torch.randn(batches * 2, 1)), 2, shuffle=shuffle)


def ordinary(epochs: int = 2) -> list[float]:
    """A training with a validation after each epoch."""
    torch.manual_seed(1)
    net, train, test = model(), loader(3, shuffle=True), loader(2)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    losses = []
    for _ in range(epochs):
        net.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        net.eval()
        with torch.no_grad():
            losses += [F.mse_loss(net(x), y).item() for x, y in test]
    return losses


def test_an_ordinary_program_is_recorded_and_computes_the_same(run_folder: Path) -> None:
    losses, timeline, report = recorded(ordinary, run_folder)
    step = ["data", "forward", "backward", "optimizer"]
    validation = ["data", "evaluate"] * 2
    of_steps = {number: [kind for step, kind in spans(timeline) if step == number] for number in range(1, 8)}
    assert all(of_steps[number] == step for number in (1, 2, 3, 5, 6)), of_steps
    assert of_steps[4] == [*validation, *step]
    assert losses == ordinary()
    assert report.steps == 6 and report.kinds["evaluate"] > 0
    assert report.samples_per_second is None and "calls no function of meshwise" in report.missing[0]


def test_after_it_torch_is_as_it_was(run_folder: Path) -> None:
    before = torch.autograd.backward
    recorded(ordinary, run_folder)
    assert torch.autograd.backward is before


def without_a_loader() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(4):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()


def test_without_a_loader_each_step_of_an_optimizer_is_one(run_folder: Path) -> None:
    _, timeline, report = recorded(without_a_loader, run_folder)
    assert report.steps == 4
    assert [kind for step, kind in spans(timeline) if step == 2] == ["forward", "backward", "optimizer"]


def one_batch_for_many_steps() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, _ = next(iter(loader(1)))
    for _ in range(5):
        net(x).sum().backward()
        optimizer.step()


def test_a_batch_that_is_read_once_for_many_steps_is_no_step(run_folder: Path) -> None:
    assert recorded(one_batch_for_many_steps, run_folder)[2].steps == 4  # the first two are told apart too late


def two_optimizers() -> None:
    one, two = model(), model()
    first, second = torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(two.parameters(), 0.1)
    for x, _ in loader(3):
        one(x).sum().backward()
        first.step()
        two(x).sum().backward()
        second.step()


def test_a_batch_with_two_optimizers_is_one_step(run_folder: Path) -> None:
    _, timeline, report = recorded(two_optimizers, run_folder)
    assert report.steps == 3
    wanted = ["data", *["forward", "backward", "optimizer"] * 2]
    assert [kind for step, kind in spans(timeline) if step == 2] == wanted


def closures() -> None:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)


def test_a_closure_is_inside_its_step(run_folder: Path) -> None:
    assert recorded(closures, run_folder)[2].steps == 3


def test_a_program_that_distributes_is_recorded_by_its_verbs_alone(run_folder: Path) -> None:
    plain_program.begin(lambda text: None)
    for _ in loader(2):  # to count words, say
        pass
    net, batches = mw.distribute(model(), loader(3), view="rank")
    optimizer = mw.distribute(torch.optim.SGD(net.parameters(), 0.1), view="rank")
    for x, _ in batches:
        mw.backward(net(x).mean())
        optimizer.step()
    end_sessions()
    assert plain_program.end() is None
    report = report_of(read_timeline(run_folder))
    assert report.steps == 3 and report.facts["program"] == "script" and report.samples_per_second


def test_a_program_that_trains_before_it_distributes_has_one_record(run_folder: Path) -> None:
    plain_program.begin(lambda text: None)
    ordinary(1)
    net, batches = mw.distribute(model(), loader(3), view="rank")
    optimizer = mw.distribute(torch.optim.SGD(net.parameters(), 0.1), view="rank")
    for x, _ in batches:
        mw.backward(net(x).mean())
        optimizer.step()
    end_sessions()
    assert report_of(read_timeline(run_folder)).steps == 6


def test_a_program_that_never_trains_leaves_no_spans(run_folder: Path) -> None:
    plain_program.begin(lambda text: None)
    for x, _ in loader(3):
        model()(x)
    assert not current().drain()[0] and plain_program.end() is None
    assert not (run_folder / names.SPANS).exists()


def test_its_advice_names_what_it_takes(run_folder: Path) -> None:
    _, _, report = recorded(ordinary, run_folder)
    words = " ".join(finding.advice for finding in report.findings)
    assert "torch.autocast" in words and "--" not in words and "mw." not in words


@pytest.mark.parametrize("program", advice.WORDS)
def test_every_sentence_can_be_said_to_every_kind_of_program(program: str) -> None:
    sentences = [*advice.TRY.values(), *advice.TRY_FOR_STRAGGLER.values(), *advice.TRY_FOR_COMMUNICATION.values()]
    said = " ".join(advice.advised(sentence, program) for sentence in sentences)
    assert ("--batch-size" in said) == (program == "job") and "{" not in said


def test_what_is_surrounded_stays_where_somebody_else_has_put_something() -> None:
    plain = torch.autograd.backward
    end = program_calls.around("backward", lambda: pytest.fail("called"))  # type: ignore[arg-type]
    torch.autograd.backward = plain
    end()
    assert torch.autograd.backward is plain


DDP = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
replicas = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 1)))
parts = fully_shard(nn.Linear(8, 4))
optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (replicas, parts)]
for step in range(12):
    for model, optimizer in zip((replicas, parts), optimizers):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step + 99 * dist.get_rank()))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
mean = loss.detach().clone()
dist.all_reduce(mean)
print(repr(mean.item()))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ddp_and_fully_shard_run_as_under_torchrun_and_are_recorded(processes: None, tmp_path: Path) -> None:
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    out = tmp_path / "runs"
    ours = [sys.executable, "-m", "meshwise", "run", "--devices", "2xcpu", "--out", str(out), str(script)]
    printed = [subprocess.run(command, capture_output=True, text=True, timeout=300) for command in (torchrun, ours)]
    assert [done.returncode for done in printed] == [0, 0], printed
    assert printed[1].stdout.split()[-1] == printed[0].stdout.split()[-1]
    report = report_of(read_timeline(names.newest_run(out)))
    assert report.steps == 24 and [rank.steps for rank in report.ranks] == [24, 24]
    found = {(collective.name, collective.of) for collective in report.collectives}
    assert {("all-reduce", "gradients"), ("broadcast", "buffers"), ("all-gather", "parameters")} <= found
    assert ("reduce-scatter", "gradients") in found and all(rank.complete for rank in report.ranks)
    assert report.error_seconds < 0.1


def test_its_collectives_are_noted_where_the_launcher_looks(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_program, "rank_context", lambda: replace(rank_context(), world=World(0, 2)))
    monkeypatch.setattr(heartbeat, "beat", heartbeat.Heartbeat(run_folder / "beats"))
    monkeypatch.setattr(verb_log, "_log", verb_log.VerbLog(run_folder / "verbs"))
    plain_program.begin(lambda text: None)
    collective = plain_program._programs[-1]._collective
    ended = collective(Call("broadcast", "start values", 8, "", "cpu", 2, True, False))
    wait = heartbeat.read_beat(run_folder / "beats").waits_in
    assert ended is not None and wait is not None
    assert (wait.name, wait.group, wait.number) == ("broadcast of start values", f"0,1/{heartbeat.PLAIN}", 1)
    ended()
    assert heartbeat.read_beat(run_folder / "beats").waits_in is None
    trail = verb_log.read_trail(run_folder / "verbs")
    assert trail is not None and trail.verb(1).startswith("broadcast at ") and "test_plain_program.py:" in trail.verb(1)


@pytest.mark.parametrize(("exchanged", "told"), [(0, 1), (8, 0)])
def test_workers_that_exchanged_nothing_are_told_to_have_trained_alone(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, exchanged: int, told: int
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(plain_program, "rank_context", lambda: replace(rank_context(), world=World(0, 2)))
    plain_program.begin(lines.append)
    program = plain_program._programs[-1]
    for number in (0, exchanged):  # a barrier is none
        program._collective(Call("all-reduce", "", number, "", "cpu", 2, True, True))
    ordinary(epochs=1)
    plain_program.tell_what_is_missing("train.py")
    assert [line.startswith("train.py: the 2 workers exchanged nothing, so each trained") for line in lines] == [
        True
    ] * told


def test_a_stop_that_came_while_the_process_started_interrupts_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for its own end, or for the minute after which the launcher ends it."""
    gate = StepGate()
    monkeypatch.setattr(plain_program, "rank_context", lambda: replace(rank_context(), gate=gate))
    gate.freeze()
    gate.set_last(0)
    with pytest.raises(KeyboardInterrupt):
        plain_program.begin(lambda text: None)
