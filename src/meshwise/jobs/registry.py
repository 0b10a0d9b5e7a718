"""Find a job by the word that the user typed: a built-in name, a built-in name with a size, or `file.py:name`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwise.jobs.gpt import gpt
from meshwise.jobs.mlp import mlp
from meshwise.jobs.mnist import mnist_cnn, mnist_mlp
from meshwise.spec.errors import UsageError, nearest
from meshwise.training.job import Job

BUILT_IN: dict[str, Callable[..., Job]] = {"gpt": gpt, "mlp": mlp, "mnist-cnn": mnist_cnn, "mnist-mlp": mnist_mlp}


def find_job(word: str, *, data: Path | None = None, seed: int | None = None) -> Job:
    """The job named `word`. `data` and `seed` go to factories that take them. Raises UsageError when there is none."""
    name, _, size = word.partition(":")
    if name.endswith(".py"):
        return _call(word, _from_file(Path(name), size), {}, data, seed)
    factory = BUILT_IN.get(name)
    if factory is None:
        hint = nearest(name, BUILT_IN)
        raise UsageError(f"no job is named '{word}'.{hint} Use {', '.join(BUILT_IN)}, or file.py:name for your own.")
    if size and "size" not in inspect.signature(factory).parameters:
        raise UsageError(f"job '{name}' has no sizes. Use {name}.")
    return _call(word, factory, {"size": size} if size else {}, data, seed)


def _call(word: str, found: Any, arguments: dict[str, Any], data: Path | None, seed: int | None) -> Job:
    if isinstance(found, Job):
        if data is not None:
            raise UsageError(
                f"--data {data}: {word} is a finished Job. "
                "Make it a function with a parameter `data` to use another folder."
            )
        return found
    if not callable(found):
        raise UsageError(f"{word} is a {type(found).__name__}. Make it a meshwise.Job, or a function that returns one.")
    accepted = inspect.signature(found).parameters
    if data is not None:
        if "data" not in accepted:
            raise UsageError(f"--data {data}: job {word} takes no data folder. Give its function a parameter `data`.")
        arguments["data"] = data
    if seed is not None and "seed" in accepted:
        arguments["seed"] = seed
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"{word}: {error}. Use a Job, or a function that makes one and needs no other arguments."
        ) from None
    job = found(**arguments)
    if not isinstance(job, Job):
        raise UsageError(f"{word} returned a {type(job).__name__}. Return a meshwise.Job.")
    return job


def _from_file(path: Path, name: str) -> Any:
    module = import_file(path)
    jobs = [key for key, value in vars(module).items() if isinstance(value, Job)]
    if not name:
        if len(jobs) == 1:
            return getattr(module, jobs[0])
        raise UsageError(f"{path}: it is not said which job to run. Use {path}:{jobs[0] if jobs else 'job'}.")
    if not hasattr(module, name):
        public = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and (callable(value) or isinstance(value, Job))
        ]
        raise UsageError(f"{path} has no '{name}'.{nearest(name, public)} Define a meshwise.Job with that name.")
    return getattr(module, name)


def import_file(path: Path) -> ModuleType:
    """The module of a Python file, imported once under its own name, its folder first on the module path.

    Raises UsageError with the line that failed.
    """
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
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UsageError:
        sys.modules.pop(name, None)
        raise
    except Exception as error:
        sys.modules.pop(name, None)
        raise UsageError(f"{path}: does not import. {_where(error, path)}{type(error).__name__}: {error}") from None
    return module


def _where(error: Exception, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return ""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()
    ]
    return f"Line {lines[-1]}: " if lines else ""
