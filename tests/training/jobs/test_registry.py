"""Jobs by the word that the user typed; what is not found, or is no job, is told in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwise.spec.errors import UsageError, WorkerFailed
from meshwise.training.job.job import Job
from meshwise.training.job.options import RunOptions
from meshwise.training.jobs.registry import BUILT_IN, find_job, import_file

TOP = """
import torch
import meshwise as mw

def make(name="mine", seed=0):
    return mw.Job(name=name, model=lambda: torch.nn.Linear(1, 1), loss=lambda m, b: m(b[0]).mean(),
                  optimizer=lambda p: torch.optim.SGD(p, 0.1), data=lambda: (torch.ones(4, 1),), seed=seed)
"""


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """`write("my_job.py", text)`: a job file with a name of its own; forgets its module and path afterwards."""
    paths, modules = list(sys.path), set(sys.modules)

    def file(text: str, name: str = "meshwise_test_job.py") -> Path:
        path = tmp_path / name
        path.write_text(TOP + text)
        return path

    yield file
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def refusal(word: str, **options: object) -> str:
    with pytest.raises(UsageError) as caught:
        find_job(word, **options)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("name", ["mlp", "mnist-mlp", "mnist-cnn"])
def test_built_in_jobs_are_found_with_their_seed(name: str) -> None:
    assert find_job(name).name == name
    assert find_job(name, seed=11).seed == 11


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    assert refusal("mnist-mpl") == (
        f"there is no job 'mnist-mpl'. Did you mean 'mnist-mlp'? "
        f"Use {', '.join(BUILT_IN)}, or file.py:name for your own."
    )
    assert "Did you mean" not in refusal("zzz")


def test_a_size_for_a_job_without_sizes_is_told() -> None:
    assert (
        refusal("mlp:large")
        == "--arg size=large: mlp:large has no parameter 'size'. Did you mean 'seed'? mlp:large takes seed."
    )


def test_a_job_or_a_function_that_makes_one_is_found_in_a_file(write: Callable[..., Path]) -> None:
    path = write("job = make('a job')\ndef factory(seed=5):\n    return make('a function', seed)\n")
    assert find_job(f"{path}:job").name == "a job"
    assert find_job(f"{path}:factory").seed == 5
    assert find_job(f"{path}:factory", seed=9).seed == 9


def test_the_only_job_of_a_file_needs_no_name(write: Callable[..., Path]) -> None:
    assert find_job(f"{write('only = make()')}").name == "mine"


def test_a_file_with_several_jobs_asks_which(write: Callable[..., Path]) -> None:
    path = write("first, second = make(), make()")
    assert refusal(f"{path}") == f"{path} has no 'job'. Write {path}:NAME, with the name of a meshwise.Job."


def test_a_folder_with_data_reaches_a_function_that_takes_one(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write("def job(data=None):\n    return make(f'from {data}')\n")
    assert find_job(f"{path}:job", args=[f"data={tmp_path}"]).name == f"from {tmp_path}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nraise ValueError('half done')", "cannot be imported. Line 9: ValueError: half done"),
        ("import meshwise_no_such_module", "cannot be imported. Line 8: ModuleNotFoundError: No module named"),
        ("def job(:\n    pass", "cannot be imported. SyntaxError: invalid syntax"),
        ("def helper():\n    return 1 / 0\nhelper()", "cannot be imported. Line 9: ZeroDivisionError"),
    ],
)
def test_a_file_that_does_not_import_is_told_with_its_line(write: Callable[..., Path], text: str, says: str) -> None:
    path = write(text)
    for _ in range(2):  # and the second time it is not taken for imported
        assert f"{path} {says}" in refusal(f"{path}:job")


def test_a_file_that_refuses_by_itself_is_not_taken_for_imported(write: Callable[..., Path]) -> None:
    path = write("from meshwise.spec.errors import UsageError\nraise UsageError('give a GPU')\njob = make()")
    for _ in range(2):
        assert refusal(f"{path}:job") == "give a GPU"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (":jop", "has no 'jop'. Did you mean 'job'? Write "),
        (":zzzzzz", "has no 'zzzzzz'. Write"),
        (":number", "must be a meshwise.Job or a function returning one, but is a int."),
        (":nothing", "must return a meshwise.Job, but it returned a NoneType."),
        (
            ":needs",
            "missing a required argument: 'width'. Give the argument with --arg NAME=VALUE, or a default.",
        ),
    ],
)
def test_what_is_no_job_in_a_file_is_told(write: Callable[..., Path], word: str, says: str) -> None:
    path = write("job = make()\nnumber = 3\ndef nothing():\n    pass\ndef needs(width):\n    return make()\n")
    found = refusal(f"{path}{word}")
    assert found.startswith(str(path)) and says in found


def test_a_function_that_raises_is_told_with_the_users_frames_alone(write: Callable[..., Path]) -> None:
    path = write("def broken():\n    return make(width=int('x'))\n")
    with pytest.raises(WorkerFailed) as failed:
        find_job(f"{path}:broken")
    first, frame, *_, last = str(failed.value).splitlines()
    assert first == "Traceback (most recent call last):" and frame.strip().startswith(f'File "{path}", line')
    assert last == f"{path}:broken failed: ValueError: invalid literal for int() with base 10: 'x'"
    assert "meshwise/training/jobs" not in str(failed.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert refusal(f"{tmp_path}/none.py:job").endswith(
        "none.py: no such file. Name a Python file, for instance train.py:job."
    )


def test_a_file_is_imported_once_and_finds_its_neighbours(write: Callable[..., Path]) -> None:
    write("width = 7", "meshwise_test_neighbour.py")
    path = write("from meshwise_test_neighbour import width\n")
    first = import_file(path)
    assert first.width == 7
    assert import_file(path) is first


def test_a_job_without_a_name_has_that_of_its_variable(write: Callable[..., Path]) -> None:
    path = write('big = make("")\ndef small(): return make("")\nown = make("mine")\n')
    assert find_job(f"{path}:big").name == "big"
    assert find_job(f"{path}:small").name == "small"
    assert find_job(f"{path}:own").name == "mine"
    assert find_job(str(write('only = make("")', "meshwise_test_other.py"))).name == "only"


def test_a_job_of_the_program_itself_is_named_after_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = dict.fromkeys(("model", "loss", "optimizer", "data"), len)
    mine = Job(**fields)
    assert RunOptions(mine).job.name == "job"  # type: ignore[union-attr]
    monkeypatch.setattr(sys.modules["__main__"], "mine", mine, raising=False)
    assert RunOptions(mine).job.name == "mine"  # type: ignore[union-attr]


def test_a_job_that_lacks_something_says_what() -> None:
    with pytest.raises(UsageError, match=r"job 'mine' lacks loss, data. Write Job\(loss=..., ...\)"):
        Job("mine", model=len, optimizer=len)  # type: ignore[arg-type]


def test_arguments_reach_the_function_with_the_types_that_it_says(write: Callable[..., Path]) -> None:
    path = write("def factory(lr: float = 1e-3, seed=0):\n    return make(f'{lr} {type(lr).__name__}', seed)\n")
    assert find_job(f"{path}:factory", args=["lr=3"]).name == "3.0 float"
    assert find_job(f"{path}:factory", args=["seed=7"]).seed == 7
    assert "has no parameter 'lrr'. Did you mean 'lr'?" in refusal(f"{path}:factory", args=["lrr=3"])
    assert "--arg seed= is given 2 times" in refusal(f"{path}:factory", args=["seed=7"], seed=3)
    assert find_job("gpt", args=["size=tiny"]).name == find_job("gpt:tiny").name


def test_a_finished_job_takes_no_arguments(write: Callable[..., Path]) -> None:
    path = write("job = make()\ndef factory(lr):\n    return make()\n")
    assert "--arg lr=3" in refusal(f"{path}:job", args=["lr=3"])
    assert f"{path}:job is a Job. Replace it by a function that takes `lr`." in refusal(f"{path}:job", args=["lr=3"])
    assert "missing a required argument: 'lr'. Give the argument with --arg" in refusal(f"{path}:factory")
    job = find_job(f"{path}:job")
    with pytest.raises(UsageError, match=r"--arg data=elsewhere: mine is a Job"):
        find_job(job, args=["data=elsewhere"])
