"""`meshwise check`: the exit code says whether the plan is one device's, the text where and why it is not."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwise.checker.compare import KINDS, Comparison
from meshwise.checker.proof import Proof
from meshwise.checker.views.check_dict import check_dict
from meshwise.checker.views.check_text import check_text
from meshwise.spec.plan import Plan
from meshwise.workers.fork_server import LISTENS, Forks

pytestmark = pytest.mark.usefixtures("processes")

Check = Callable[..., tuple[int, str, str]]

JOBS = """
import torch
import torch.nn.functional as F
from torch import nn, optim

from meshwise import Job


def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))


class OwnBatchNorm(nn.Module):
    # Written by hand: nobody knows that its mean is one over the batch.
    def forward(self, x):
        return x - x.mean(0)


class OwnWeights(nn.Module):
    # No layer that tensor parallel knows.
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 6, 3))

    def forward(self, x):
        return torch.einsum("bi,eio->bo", x, self.experts)


def normed():
    return nn.Sequential(nn.Linear(6, 8), OwnBatchNorm(), nn.Linear(8, 3))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def rows():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(30, 6, generator=generator), torch.randint(3, (30,), generator=generator)


def optimizer(parameters):
    return optim.AdamW(parameters, lr=0.01)


job = Job("dropped", model, loss, optimizer, rows, rows, batch_size=8)
own = Job("own", OwnWeights, loss, optimizer, rows, rows, batch_size=8)
batch_norm = Job("normed", normed, loss, optimizer, rows, rows, batch_size=8)
"""

VALIDATION = """
import torch, meshwise as mw
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(12, 3)
model = torch.nn.Linear(3, 2)
model, optimizer, loader = mw.distribute(
    model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(x, x[:, :2]), batch_size=4), view="rank"
)
for epoch in range(2):
    for a, b in loader:
        mw.backward((model(a) - b).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    seen = sum(len(a) for a, b in loader)
    mw.log(VALUE)
"""


@pytest.fixture
def check(command: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Check]:
    """`check("train.py:job", "--json")`, in a folder with `train.py`: exit code, stdout, stderr."""
    (tmp_path / "train.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("train", None)
    yield partial(command, "check")
    sys.modules.pop("train", None)


def last_of(out: str) -> str:
    """The last paragraph of what is printed."""
    return " ".join(out.rstrip().rpartition("\n\n")[2].splitlines())


def test_what_is_equal_is_zero(check: Check) -> None:
    code, out, err = check("train.py:job", "--set", "accumulate=2", "--devices", "2xcpu", "--perturb")
    assert code == 0, out + err
    assert "not judged" not in out and "not looked at" not in out
    assert "CPUs have no CUDA streams: use --devices 2xcuda to look for races between streams too" in err
    lines, verdict = out.splitlines(), last_of(out)
    band = (
        r"in fp32 rounding alone moves, in 3 steps and on one device too: loss \S+, parameters \S+, evaluation \S+\. "
    )
    assert re.search(band + "It grows over an epoch, and is not a fault.$", verdict), verdict
    assert verdict.startswith("equal: Plan(data=2, accumulate=2) computes what one device computes")
    table = lines[: lines.index("")]
    assert table[0].split() == ["compared", "how", "many", "differ", "largest", "where"]
    assert "gradients" in out and "in fp32" in out and all(len(line) <= 80 for line in lines)
    assert len({line.index(" -") if " -" in line else line.index(" –") for line in table[1:]}) == 1  # they line up
    assert "dropout" not in out  # it is keyed here: nothing of it differs


def test_what_differs_is_one_and_says_why(check: Check) -> None:
    code, out, err = check("train.py:batch_norm", "--no-rounding")
    assert code == 1, out + err
    assert "not looked at (--no-rounding)" in out and "rounding alone" not in out
    verdict = last_of(out)
    assert verdict.startswith("different: module outputs in 1, step 1, by ")
    assert "module    1 (OwnBatchNorm)" in verdict
    assert "cause     batch-norm statistics" in verdict and "because   1 is a OwnBatchNorm" in verdict
    assert verdict.endswith("more      docs/check.md#batch-norm-statistics")


@pytest.mark.parametrize(("job", "warned"), [("own", True), ("job", False)])
def test_a_plan_that_divides_nothing_is_warned_of_above_the_verdict(job: str, warned: bool, check: Check) -> None:
    code, out, err = check(f"train.py:{job}", "--set", "tensor=2", "--no-rounding", "--steps", 2)
    assert code == 0, out + err
    first, _, rest = " ".join(out.split()).partition("equal: Plan(tensor=2)")
    assert ("warning: this plan divides little: tensor=2: 0% of the" in first) == warned and rest
    if warned:
        assert "experts (OwnWeights)" in first and "expert=2, which divides stacked experts, or shard=2" in first
    assert "divides little" not in rest


def test_much_that_is_not_compared_is_one_line_above_the_verdict() -> None:
    left_out = tuple(f"outputs of {number} (Linear): not that of single samples (1 call)." for number in range(66))
    proof = Proof("job", Plan(data=2), "2xcpu", (8, 8), Comparison((), (), None, {}, left_out), "", None)
    written = io.StringIO()
    Console(width=200, file=written).print(check_text(proof))
    out = written.getvalue()
    assert out.count("not compared") == 1 and "66 items, which --json names; the first: outputs of 0" in out
    assert out.index("not compared") < out.index("equal: ")
    assert check_dict(proof)["left_out"] == list(left_out)


def test_every_figure_is_in_the_json(check: Check, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("data = 2\n")
    code, out, _ = check("train.py:batch_norm", "--plan", "plan.toml", "--json", "--steps", 2, "--no-rounding")
    said = json.loads(out)
    assert code == 1 and said["equal"] is False and said["batches"] == [8, 5] and said["plan"] == {"data": 2}
    assert said["first"]["module"] == "1" and said["cause"]["name"] == "batch-norm statistics"
    assert {kind["kind"] for kind in said["compared"]} <= set(KINDS)
    assert all(set(d) == {"kind", "step", "name", "relative", "facts"} for d in said["differences"])


@pytest.mark.parametrize(
    ("value", "verdict", "lines"),
    [
        ("tokens=mw.sum(seen)", "equal", []),
        ("tokens=seen", "not judged", ["own.py:16"]),
    ],
)
def test_what_is_not_judged_is_four_and_says_the_line(
    value: str, verdict: str, lines: list[str], check: Check, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(VALIDATION.replace("VALUE", value))
    code, out, err = check("--no-rounding", "--json", "own.py")
    said = json.loads(out)
    assert code == (4 if lines else 0), out + err
    assert said["equal"] and said["verdict"] == verdict
    assert [text.split(" shows ")[0] for text in said["not_judged"]] == lines
    assert [*json.loads((tmp_path / "runs" / "checks.json").read_text()).values()] == [verdict]


def test_ranks_that_wait_for_each_other_are_ended_with_their_lines(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwise.checker.check.HANG_LIMIT", 6.0)
    extra = "if mw.rank() == 1:\n            torch.distributed.all_reduce(torch.ones(1))\n        optimizer.step()"
    (tmp_path / "own.py").write_text(VALIDATION.replace("VALUE", "a=1").replace("optimizer.step()", extra))
    code, out, err = check("--no-rounding", "own.py")
    assert code == 2 and not out
    last = err.splitlines()[-1]
    assert last.startswith("No progress for ") and "Every rank must make the same calls" in last
    assert "rank 1 stands at own.py:14 in <module>; rank 0 waits for it in optimizer.step" in last
    assert "rank 0 stands at own.py:15 in <module>" in last


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nope.py",), "no such file"),
        (("--batch-size", 3, "train.py"), "this option works only for jobs"),
        (("nope",), "there is no job 'nope'"),
        (("train.py:job", "--steps", 0), "at least 1"),
        (("train.py:job", "--plan", "nope.toml"), "no plan can be read"),
        (("train.py:job", "--set", "shard=0"), "whole number"),
        (("train.py:job", "--set", "data=3", "--devices", "2xcpu"), "data=3 needs 3 devices, but this run has 2"),
        (("train.py:job", "--plan", "three.toml", "--devices", "2xcpu"), "data=3 needs 3 devices, but this run has 2"),
    ],
)
def test_what_cannot_be_is_two(words: tuple[object, ...], says: str, check: Check, tmp_path: Path) -> None:
    (tmp_path / "three.toml").write_text("data = 3\n")
    code, out, err = check(*words)
    assert code == 2 and says in err and not out, err


def test_passes_are_shown_from_the_first_moment_on(check: Check) -> None:
    code, _, err = check("train.py:job", "--steps", "2")
    shown = [line.removeprefix("train.py:job  ") for line in err.splitlines()]
    plan = "Plan(data=2) on 2xcpu"
    assert code == 0 and shown == [
        "a check of 2 steps",
        "pass 1 of 4: one device, in float64",
        "pass 2 of 4: one device, in the plan's own precision",
        f"pass 3 of 4: {plan}, in float64",
        f"pass 4 of 4: {plan}, in the plan's own precision",
    ]


def test_torch_is_imported_once_for_the_workers_of_all_passes(
    check: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers = list[Forks]()
    begin = Forks.server

    def counted(forks: Forks, variables: Any) -> Forks:
        servers.extend([forks] if forks._line is None else [])
        return begin(forks, variables)

    monkeypatch.setattr(Forks, "server", counted)
    monkeypatch.setattr(
        "meshwise.checker.check.allowed_cores", lambda: range(4)
    )  # the plan's passes run beside each other
    (tmp_path / "script.py").write_text(VALIDATION.replace("mw.log(VALUE)", "").replace("(12, 3)", "(13, 3)"))
    code, _, err = check("script.py")
    assert code == 0 and "pass 4 of 4" in err and len(servers) == 1, err


@pytest.mark.workers
def test_a_check_in_python_needs_no_server_begun_before(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(VALIDATION.replace("mw.log(VALUE)", ""))
    words = [sys.executable, "-c", "import meshwise as mw; print(mw.check('script.py').verdict.value)"]
    alone = {name: value for name, value in os.environ.items() if name != LISTENS}
    ended = subprocess.run(words, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert ended.stdout == "equal\n", ended.stderr


def test_what_is_refused_later_has_said_at_once_that_it_began(check: Check) -> None:
    _, _, err = check("absent.py:job")
    assert err.startswith("absent.py:job  a check of 3 steps\n")


def test_a_program_that_raises_is_shown_once_and_without_our_frames(check: Check, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(
        "from dataclasses import replace\nfrom train import job\n\ndef loss(model, batch):\n"
        "    raise ValueError('not today')\n\njob = replace(job, loss=loss)\n"
    )
    code, out, err = check("raises.py:job")
    assert code == 2 and not out
    assert err.endswith("\none device, in fp64, failed: ValueError: not today\n") and err.count("Traceback") == 1
    assert "raises.py" in err and "equivalence" not in err
