"""Find a job by the user's word: a name or `file.py:name`.

A built-in name may be followed by a size.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn, optim

from meshwise.spec.arguments import argument_texts, read_arguments
from meshwise.spec.errors import MeshwiseError, UsageError, WorkerFailed, nearest
from meshwise.spec.words import error_text
from meshwise.training.job.job import Job
from meshwise.training.jobs.gpt import gpt
from meshwise.training.jobs.mnist import Batch, accuracy, cross_entropy, mnist_cnn, mnist_mlp
from meshwise.workers.failure import user_traceback

FEATURES, CLASSES = 1000, 10
TRAIN_SAMPLES, TEST_SAMPLES = 10_000, 2_000
CENTRE_SCALE = 0.2  # with noise of scale 1, 10 epochs of SGD at 1e-3 then reach about 97 % test accuracy


def mlp(*, seed: int = 0) -> Job:
    """Return the job of tutorial 2: three linear layers, SGD with a learning rate of 1e-3, 10 epochs."""

    def model() -> nn.Module:
        first, second, last = nn.Linear(FEATURES, 1000), nn.Linear(1000, 1000), nn.Linear(1000, CLASSES)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

    return Job(
        name="mlp",
        model=model,
        loss=cross_entropy,
        optimizer=partial(optim.SGD, lr=1e-3),
        data=lambda: draw_samples(seed)[0],
        test=lambda: draw_samples(seed)[1],
        metrics=accuracy,
        batch_size=32,
        epochs=10,
        seed=seed,
    )


def draw_samples(seed: int) -> tuple[Batch, Batch]:
    """Draw the training set and the test set for a seed, each with float32 features (samples, 1000) and int64 labels
    (samples,)."""
    generator = torch.Generator().manual_seed(seed)
    centres = CENTRE_SCALE * torch.randn(CLASSES, FEATURES, generator=generator)

    def draw(count: int) -> Batch:
        labels = torch.randint(CLASSES, (count,), generator=generator)
        return centres[labels] + torch.randn(count, FEATURES, generator=generator), labels

    return draw(TRAIN_SAMPLES), draw(TEST_SAMPLES)


BUILT_IN: dict[str, Callable[..., Job]] = {"gpt": gpt, "mlp": mlp, "mnist-cnn": mnist_cnn, "mnist-mlp": mnist_mlp}


def find_job(word: str | Job, *, seed: int | None = None, args: Iterable[str] = ()) -> Job:
    """Return the job that a word names, or `word` itself if it is a Job.

    word: the name of a built-in job, with a size if it has several (`gpt:small`), or `file.py:name`.
    seed: passed to the job's function if it has a parameter `seed`.
    args: texts `NAME=VALUE` for other parameters of the job's function.

    Raises UsageError if there is no such job, or if its function does not take the given arguments.
    """
    if isinstance(word, Job):
        return _call(word.name or "the job", word, tuple(args))
    name, _, size = word.partition(":")
    if name.endswith(".py"):
        jobs = [key for key, value in vars(import_file(Path(name))).items() if isinstance(value, Job)]
        bound = size or (jobs[0] if len(jobs) == 1 else "job")
        found = find_in_file(Path(name), bound, f"Write {name}:NAME, with the name of a meshwise.Job.")
        return _call(word, found, tuple(args), seed).named(bound)
    if name not in BUILT_IN:
        hint = nearest(name, BUILT_IN)
        raise UsageError(f"there is no job '{word}'.{hint} Use {', '.join(BUILT_IN)}, or file.py:name for your own.")
    return _call(word, BUILT_IN[name], (*args, f"size={size}") if size else tuple(args), seed)


def _call(word: str, found: Any, texts: tuple[str, ...], seed: int | None = None) -> Job:
    if isinstance(found, Job):
        if texts:
            name = texts[0].partition("=")[0]
            raise UsageError(f"--arg {texts[0]}: {word} is a Job. Replace it by a function that takes `{name}`.")
        return found
    if not callable(found):
        raise UsageError(f"{word} must be a meshwise.Job or a function returning one, but is a {type(found).__name__}.")
    signature = inspect.signature(found)
    if seed is not None and "seed" in signature.parameters:
        texts = argument_texts((*texts, f"seed={seed}"))
    arguments = read_arguments(found, texts, word)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(f"{word}: {error}. Give the argument with --arg NAME=VALUE, or a default.") from None
    try:
        job = found(**arguments)
    except MeshwiseError:
        raise
    except Exception as error:
        raise WorkerFailed(f"{user_traceback(error).rstrip()}\n{word} failed: {error_text(error)}") from None
    if not isinstance(job, Job):
        raise UsageError(f"{word} must return a meshwise.Job, but it returned a {type(job).__name__}.")
    return job


def find_in_file(path: Path, name: str, instead: str = "Name a data set or a function returning one.") -> Any:
    """Return the object called `name` in a Python file. Raises UsageError if there is none."""
    module = import_file(path)
    if not hasattr(module, name):
        raise UsageError(f"{path} has no '{name}'.{nearest(name, vars(module))} {instead}")
    return getattr(module, name)


def import_file(path: Path) -> ModuleType:
    """Import a Python file as a module named like the file."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file. Name a Python file, for instance train.py:job.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path.resolve()):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None  # true for a path that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        sys.modules.pop(name, None)
        raise UsageError(
            f"{path} exits while it is imported (exit code {error.code}). Parse the command line and train under `if "
            f"__name__ == '__main__':`, or run it as a script: meshwise run {path}."
        ) from None
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, UsageError | KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"Line {frame.lineno}: " for frame in frames if Path(frame.filename) == path.resolve()]
        raise UsageError(f"{path} cannot be imported. {''.join(lines[-1:])}{error_text(error)}") from None
    return module
