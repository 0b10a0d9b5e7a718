"""Bad input gets one clear sentence and exit code 2, never a traceback."""

from __future__ import annotations

import gzip
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwise.spec.errors import UsageError
from meshwise.training.job.options import RunOptions
from meshwise.training.jobs.mnist import MNIST

Typed = Callable[[str], tuple[int, str]]
NEEDED = ("model", "loss", "optimizer", "data")
JOB_FILE = """
import torch
from torch import nn
import meshwise as mw

def make(samples=8, **fields):
    x = torch.randn(samples, 4)
    return mw.Job(**{
        "name": "mine", "model": lambda: nn.Linear(4, 1), "data": lambda: (x, x[:, :1]),
        "loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1), **fields})

job = make()
empty = make(samples=0)
not_scalar = make(loss=lambda model, batch: (model(batch[0]) - batch[1]).pow(2))
not_a_tensor = make(loss=lambda model, batch: 3)
wider = make(model=lambda: nn.Linear(4, 2))
number = 7
"""


@pytest.fixture
def typed(here: Path, command: Callable[..., tuple[int, str, str]]) -> Typed:
    """`typed("run mine.py:job")` in a folder with these files: the exit code and what is on stderr, but for the lines
    that workers are started, and where docs/ says more."""

    def call(words: str) -> tuple[int, str]:
        code, out, err = command(*shlex.split(words))
        assert "Traceback" not in out + err
        assert code or "more with   meshwise report runs/" in out  # a run that is fine says where to look
        lines = [line for line in err.strip().splitlines() if not line.startswith(("starting    ", "more      "))]
        return code, "\n".join(lines)

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(JOB_FILE)
    (tmp_path / "broken.py").write_text("import torch\n\nvalue = torch.nothing\n")
    (tmp_path / "unfinished.py").write_text("def f(:\n")
    (tmp_path / "mark.toml").write_text("shards = 2\n", encoding="utf-8-sig")
    return tmp_path


SENTENCES = {
    "mnist-mlpp": "UsageError: there is no job 'mnist-mlpp'. Did you mean 'mnist-mlp'?",
    "gpt:tinny": "UsageError: gpt has no size 'tinny'. Did you mean 'tiny'?",
    "mlp:large": "UsageError: --arg size=large: mlp:large has no parameter 'size'.",
    "missing.py:job": "missing.py: no such file",
    "broken.py:job": "broken.py cannot be imported. Line 3: AttributeError",
    "unfinished.py:job": "unfinished.py cannot be imported. SyntaxError",
    "mine.py:jbo": "mine.py has no 'jbo'. Did you mean 'job'?",
    "mine.py:number": "mine.py:number must be a meshwise.Job or a function returning one, but is a int",
    "mine.py:job --devices 2xgpu": "unknown kind of device 'gpu'. Did you mean 'cuda'? Use one of cpu, cuda, xpu, mps.",
    "mine.py:job --devices 0xcpu": "at least one device",
    "mine.py:job --devices 4000xcpu": "can start 256 CPU workers at most",
    "mine.py:job --devices cpu:0,1": "CPU workers have no indices. Use 2xcpu.",
    "mine.py:job --set precision=fp8": "precision='fp8' is not known",
    "mine.py:job --set accumulate=0": "accumulate=0 must be a whole number of at least 1",
    "mine.py:job --epochs 0": "epochs=0 must be a whole number of at least 1",
    "mine.py:job --batch-size -5": "batch_size=-5 must be a whole number of at least 1",
    "mine.py:job --epochs many": "Invalid value for '--epochs'",
    "mine.py:job --log-every 0": "--log-every must be at least 1, but it is 0",
    "mine.py:job --speed fast": "No such option: --speed",
    "mine.py:job fast": "Got unexpected extra argument",
    "--speed fast mine.py": "No such option: --speed",
    "mine.py:job --arg data=folder": "is a Job. Replace it by a function that takes `data`",
    "mine.py:job --nnodes 2 --node-rank 2 --master-addr here": "--node-rank must be from 0 to 1 with --nnodes 2, but",
    "mine.py:job --node-rank 1": "--node-rank must be from 0 to 0 with --nnodes 1, but it is 1",
    "mine.py:job --nnodes 2": "--master-addr is missing: name machine 0, the same on every machine",
    "mine.py:job --nnodes 2 --rdzv-endpoint here": "--rdzv-endpoint here: write the address and port of machine 0",
    "mine.py:job --nnodes 2 --rdzv-endpoint here:1 --master-addr here": "Use only one of these.",
    "mine.py:job --nnodes 2 --master-addr here --master-port 99999": "a port is a number from 1 to 65535",
    "mine.py:job --plan mine.py": "mine.py: the plan file is not TOML",
    "mine.py:job --plan mark.toml": "mark.toml: a plan has no field 'shards'. Did you mean 'shard'?",
    "mine.py:job --set precision=bf16 --set precision=fp32": "precision is set twice, the second time by",
    "mnist-mlp --arg data=nowhere": "DataError",
    "mine.py:job --devices ''": "--devices is empty. Use 2xcpu or all, or remove --devices.",
    "mine.py:job --nnodes 0": "--nnodes must be at least 1, but it is 0",
    "--json mine.py": "--json works only for jobs, and mine.py is a script. Use meshwise report --json.",
    "--resume nowhere": "nowhere is not a run folder",
    "": "meshwise run needs a job. Use meshwise run mnist-mlp",
    "missing.py": "missing.py: no such file",
    "--epochs 3 mine.py": "--epochs 3: this option works only for jobs, but mine.py is a script",
}


@pytest.mark.parametrize("words", sorted(SENTENCES))
def test_a_wrong_word_is_answered_before_any_worker_starts(words: str, here: Path, typed: Typed) -> None:
    code, shown = typed(f"run {words}")
    assert code == 2
    assert SENTENCES[words] in shown and len(shown.splitlines()) == 1, shown
    assert not (here / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA devices")
def test_cuda_without_a_gpu_says_so(typed: Typed) -> None:
    code, shown = typed("run mine.py:job --devices 2xcuda")
    assert code == 2 and "finds no cuda device here. Use 2xcpu, or all." in shown


@pytest.mark.usefixtures("processes")
def test_a_truncated_data_file_is_told_with_its_bytes(here: Path, typed: Typed) -> None:
    shutil.copytree(MNIST, here / "cut")
    images = here / "cut" / "train-images-idx3-ubyte.gz"
    (here / "cut" / "train-images-idx3-ubyte").write_bytes(gzip.decompress(images.read_bytes())[:-1000])
    images.unlink()
    code, shown = typed("run mnist-mlp --arg data=cut --devices 1xcpu")
    assert code == 2 and "DataError" in shown and "train-images-idx3-ubyte" in shown


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("empty", "is empty. Give at least one sample"),
        ("not_scalar", "returned a tensor of shape (8, 1), not one number"),
        ("not_a_tensor", "returned a int, not one number"),
    ],
)
def test_what_only_a_worker_sees_is_one_sentence_too(job: str, sentence: str, typed: Typed) -> None:
    code, shown = typed(f"run mine.py:{job} --devices 1xcpu")
    assert code == 2 and sentence in shown and len(shown.splitlines()) == 1


@pytest.mark.usefixtures("processes")
def test_a_checkpoint_of_another_model_is_refused(here: Path, typed: Typed) -> None:
    assert typed("run mine.py:job --devices 1xcpu")[0] == 0
    (folder,) = (here / "runs").iterdir()
    other = JOB_FILE.replace("nn.Linear(4, 1)", "nn.Linear(4, 13)")  # bytecode is kept by size and second
    (here / "mine.py").write_text(other)
    sys.modules.pop("mine")
    before = {name: (folder / name).read_bytes() for name in ("run.json", "plan.toml")}
    code, shown = typed(f"run --resume {folder} --epochs 2")
    assert {name: (folder / name).read_bytes() for name in before} == before  # the run is still finished
    assert code == 2
    assert "the checkpoint belongs to another model: weight has shape (1, 4) in it and (13, 4) in this" in shown


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("job", ["job = mw.Job(**fields)", "def job() -> mw.Job:\n    return mw.Job(**fields)"])
def test_a_script_that_defines_a_job_and_trains_nothing_is_told_how_to_train_it(
    job: str, here: Path, typed: Typed
) -> None:
    (here / "net.py").write_text(f"import meshwise as mw\nfields = dict.fromkeys({NEEDED}, len)\n{job}\n")
    code, shown = typed("run --devices 1xcpu net.py")
    assert code == 2
    assert shown == "UsageError: net.py defines the job 'job' but trains nothing. Run net.py:job to train it."


def test_options_without_effect_are_refused(typed: Typed) -> None:
    for words, sentence in {
        "bench": "--devices : this does not name a",
        "check mine.py:job": "--devices is empty.",
    }.items():
        code, shown = typed(f"{words} --devices ''")
        assert code == 2 and sentence in shown and len(shown.splitlines()) == 1


def test_an_errors_text_has_no_control_characters(here: Path, typed: Typed) -> None:
    (here / "loud.py").write_text("raise ValueError('\\x1b[31mred\\a' + 'x' * 9000)")
    code, shown = typed("run loud.py:job")
    assert code == 2 and "ValueError: redxxx" in shown and "more characters)" in shown and len(shown) < 2300


@pytest.mark.parametrize("words", ["run X.py", "run X.py:job", "check X.py", "devices X"])
def test_a_name_that_no_file_can_have_is_one_sentence_that_fits(words: str, typed: Typed) -> None:
    code, said = typed(words.replace("X", "x" * 5000))
    assert code == 2 and "this file name is too long" in said.replace("\n", " ")
    assert "…" in said and len(said) < 400


@pytest.mark.parametrize("text", ["x = " + "[" * 5000 + "]" * 5000, "x = " + "{a=" * 5000 + "1" + "}" * 5000])
@pytest.mark.parametrize("verb", ["run", "check"])
def test_a_plan_of_tables_within_tables_is_refused(verb: str, text: str, typed: Typed) -> None:
    Path("deep.toml").write_text(text)
    code, said = typed(f"{verb} mine.py:job --plan deep.toml")
    assert code == 2 and "nested too deep" in said


@pytest.mark.parametrize("given", [{"restarts": 2}, {"on_failure": "true"}])
def test_restarts_where_nobody_starts_anything_again_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"under torchrun: .* ends with exit code 85. Remove this option"):
        RunOptions("mlp", **given).refuse_restarts("under torchrun", "on_failure")
    RunOptions("mlp", restarts=0).refuse_restarts("under torchrun", "on_failure")
    RunOptions("mlp", on_failure="true").refuse_restarts("on several machines")
