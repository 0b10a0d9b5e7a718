"""`meshwise plan`: the exit code says whether a plan fits, the text which is the fastest; no device is needed.

Of planner/options.py too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from meshwise.hardware.machines import find_machine
from meshwise.planner.estimator import rehearser
from meshwise.planner.trace import trace
from meshwise.planner.work import CollectiveOperation
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import read_plan
from meshwise.spec.prediction import prediction_in
from meshwise.training.jobs.registry import find_job
from tests.planner.test_scripts import SCRIPT as OF_ONE_LOOP

Planned = Callable[..., tuple[int, str, str]]

JOBS = """
import torch
from torch import nn, optim
from torch.nn import functional as F

from meshwise import Job


class Tagger(nn.Module):
    # A network that nobody here knows: an LSTM over words, a label for each.
    def __init__(self):
        super().__init__()
        self.words, self.labels = nn.Embedding(50, 16), nn.Linear(24, 5)
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True)

    def forward(self, words):
        return self.labels(self.lstm(self.words(words))[0])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.inside = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(16, 1, 2, 2)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        a = F.relu(self.norm(self.down(x)))
        return self.out(torch.cat([a, self.up(F.relu(self.inside(a)))], 1))


class Towers(nn.Module):
    # Two towers that share their embeddings.
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(100, 16)
        self.left, self.right = (nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, pairs):
        return (self.left(self.items(pairs[:, 0])) * self.right(self.items(pairs[:, 1]))).sum(-1)


class Reads(nn.Linear):
    def forward(self, x):
        return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)


def adam(parameters):
    return optim.Adam(parameters, 1e-3)


def numbers(*shape, most=None):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator) if most is None else torch.randint(most, shape, generator=generator)


tagger = Job("tagger", Tagger, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), adam,
             lambda: (numbers(64, 12, most=50), numbers(64, 12, most=5)), batch_size=16)
unet = Job("unet", UNet, lambda m, b: F.mse_loss(m(b[0]), b[0]), adam, lambda: (numbers(32, 1, 16, 16),), batch_size=8)
towers = Job("towers", Towers, lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), b[1]), adam,
             lambda: (numbers(64, 2, most=100), (numbers(64) > 0).float()), batch_size=16)
large = Job("large", lambda: nn.Embedding(1_100_000, 1000), lambda m, b: m(b[0]).square().mean(), adam,
            lambda: (numbers(64, 4, most=100),), batch_size=16)
reads = Job("reads", lambda: Reads(4, 4), lambda m, b: m(b[0]).mean(), adam, lambda: (numbers(32, 4),), batch_size=8)
"""

SCRIPT = OF_ONE_LOOP + "    open('log.txt', 'a').write('step')\nprint('epoch')\n"
LARGE_SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import meshwise as mw
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Embedding(1_100_000, 1000), nn.Linear(1000, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randint(9, (32,))), batch_size=8)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for (x,) in loader:
    mw.backward(model(x.to(device)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: object, command: Planned) -> Planned:
    """`planned(words…)` runs the command in a folder with jobs.py: the exit code, stdout and stderr."""
    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    return partial(command, "plan")


@pytest.mark.parametrize("plan", [Plan(), Plan(data=2), Plan(shard=2)], ids=str)
@pytest.mark.parametrize("name", ["tagger", "unet", "towers"])
def test_models_that_nobody_named_are_planned(name: str, plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    found = rehearser(find_job(f"{tmp_path / 'jobs.py'}:{name}"), find_machine("2xH100"))(plan).estimate
    assert found.seconds is not None and found.seconds.low <= found.seconds.value <= found.seconds.high
    assert found.memory.allocated == sum(found.memory.categories.values())


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("name", ["tagger", "unet", "towers"])
def test_models_that_nobody_named_are_split_or_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)
    job = find_job(f"{tmp_path / 'jobs.py'}:{name}")
    (traced,) = trace(job, Plan(tensor=2), kind)
    assert any(isinstance(each.what, CollectiveOperation) for each in traced.step.launches)
    staged = Plan(pipeline=2, accumulate=2)
    if name == "towers":
        assert len(trace(job, staged, kind)) == 2
        return
    with pytest.raises(PlanError, match="has no repeated layers to cut into stages"):
        trace(job, staged, kind)


def test_the_best_plan_is_shown_and_saved(planned: Planned, tmp_path: Path) -> None:
    code, out, err = planned("mnist-mlp", "--machine", "2xH100", "--seconds", "0.01", "--save", "best.toml")
    assert code == 0, err
    assert "mnist-mlp on 2xH100, batch 64" in out and "data=1 fits" in out
    assert read_plan(tmp_path / "best.toml", 2) == Plan()


def test_a_script_is_planned_and_its_files_stay_as_they_were(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "log.txt").write_text("mine")
    code, out, err = planned("--machine", "2xH100", "--seconds", "0.01", "train.py", "--size", "64")
    assert code == 0, err
    assert "train.py on 2xH100, batch 8" in out and "data=1 fits" in out and "epoch" not in out
    assert (tmp_path / "log.txt").read_text() == "mine"


def test_a_model_above_a_billion_parameters_is_planned_in_bf16_unless_a_dtype_is_given(planned: Planned) -> None:
    words = ("jobs.py:large", "--machine", "8xH100", "--seconds", "0.01")
    code, out, err = planned(*words)
    assert code == 0, err
    assert "1.1 billion parameters are planned in bf16" in out
    assert "guessed, not rehearsed yet" in err and err.count("guessed") == 1
    _, out, _ = planned(*words, "--set", "param_dtype=fp32")
    assert "bf16" not in out


def test_a_large_script_is_planned_in_bf16_as_a_job_is(planned: Planned, tmp_path: Path) -> None:
    """A script of a billion parameters was priced in fp32 without a word."""
    (tmp_path / "train.py").write_text(LARGE_SCRIPT)
    words = ("--machine", "8xH100", "--seconds", "0.01")
    code, out, err = planned(*words, "train.py")
    assert code == 0, err
    assert "1.1 billion parameters are planned in bf16" in out and "batch 8, computed in bf16" in out
    _, out, _ = planned(*words, "--set", "precision=fp32", "train.py")
    assert "bf16" not in out and "batch 8, computed in fp32" in out


def test_a_plan_that_does_not_fit_is_one(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("shard = 2\n")
    words = ("mnist-mlp", "--machine", "2xH100", "--fits", "plan.toml")
    code, out, _ = planned(*words)
    assert code == 0 and "shard=2 fits" in out
    code, out, _ = planned(*words, "--within", "1MiB")
    assert code == 1 and "shard=2 does not fit" in out


def test_between_its_ends_it_is_too_close_to_call_and_one(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("shard = 2\n")
    words = ("mnist-mlp", "--machine", "2xH100", "--fits", "plan.toml")
    memory = json.loads(planned(*words, "--json")[1])["plans"][0]["memory"]["total"]
    code, out, _ = planned(*words, "--within", f"{memory['value'] / 2**20:.3f}MiB", "--seconds", "0.01")
    assert code == 1 and "shard=2 is too close to call: " in out


def test_where_nothing_fits_the_nearest_is_named_and_nothing_is_saved(planned: Planned, tmp_path: Path) -> None:
    words = ("mnist-mlp", "--machine", "1xH100", "--within", "1MiB", "--seconds", "0.01")
    code, out, _ = planned(*words)
    assert code == 1 and "No plan fits. The nearest plan, data=1 " in out and "parameters " in out
    code, _, err = planned(*words, "--save", "best.toml")
    assert code == 2 and "none is certain to fit" in err and not (tmp_path / "best.toml").exists()


def test_explain_alone_is_that_of_the_first_and_json_has_it(planned: Planned) -> None:
    words = ("mnist-mlp", "--machine", "1xH100", "--seconds", "0.01")
    code, out, _ = planned(*words, "--explain")
    assert code == 0 and "data=1 in detail" in out and "What limits it: " in out
    told = json.loads(planned(*words, "--explain", "--memory", "--json")[1])
    explained, memory = told["explained"], told["memory"]
    assert explained["plan"] == {"data": 1} and explained["time"]["phases"]["forward"]["computing"] > 0
    assert memory["peak"]["bytes"] == told["plans"][0]["memory"]["allocated"]
    assert told["training"]["steps"] == 4690 and told["plans"][0]["device_hours"] > 0


def test_what_memory_goes_to_is_asked_of_one_plan(planned: Planned) -> None:
    code, out, _ = planned("mnist-mlp", "--machine", "2xcpu", "--memory", "--set", "data=2", "--seconds", "0.01")
    assert code == 0 and "before the step" in out and "made by" in out and "data=2 needs " in out


def test_a_saved_plan_keeps_its_prediction(planned: Planned, tmp_path: Path) -> None:
    assert planned("mnist-mlp", "--machine", "1xH100", "--seconds", "0.01", "--save", "best.toml")[0] == 0
    predicted = prediction_in((tmp_path / "best.toml").read_text())
    assert predicted is not None and predicted.machine == "1xH100" and predicted.kinds["forward"] > 0
    assert planned("mnist-mlp", "--machine", "1xH100", "--fits", "best.toml")[0] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("mnist-mlp", "--machine", "1xH100", "--steps", "0"), "--steps must be at least 1, but it is 0"),
        (("mnist-mlp", "--machine", "8xH1000"), "H1000"),
        (("mnist-mlp", "--machine", "2xH100", "--set", "data=2", "--batch-size", "3"), "no plan can divide"),
        (("mnist-mlp", "--machine", "2xH100", "--fits", "missing.toml"), "missing.toml"),
        (("mnist-mlp", "--machine", "2xH100", "--set", "tensor=4", "--fits", "four.toml"), "needs 4 devices"),
        (("mnist-mlp", "--machine", "2xH100", "--devices", "4"), "with at most 2 devices, but it is 4"),
        (("mnist-mlp", "--machine", "2xH100", "--within", "much"), "--within"),
        (("mnist-mlp", "--machine", "2xH100", "--allow", "magic"), "magic"),
        (("jobs.py:reads", "--machine", "1xH100"), "values"),
        (("--machine", "1xH100", "jobs.py"), "never passes a model to mw.distribute"),
        (("missing.py", "--machine", "1xH100"), "no such file"),
        (("--machine", "1xH100", "--batch-size", "8", "jobs.py"), "this option works only for jobs"),
    ],
)
def test_what_cannot_be_is_two_and_one_sentence(
    words: tuple[str, ...], says: str, planned: Planned, tmp_path: Path
) -> None:
    (tmp_path / "four.toml").write_text("tensor = 4\n")
    code, out, err = planned(*words)
    assert code == 2 and says in err and "Traceback" not in err and not out
