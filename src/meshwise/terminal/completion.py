"""Complete words in a shell: jobs, files, plan fields, devices, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

from meshwise.spec.devices import DEVICE_KINDS
from meshwise.spec.plan import Plan

BUILT_IN = ("gpt", "mlp", "mnist-cnn", "mnist-mlp")
TRACKERS = ("mlflow", "tensorboard", "wandb")
DEVICES = ("all", *(f"{count}x{kind}" for kind in DEVICE_KINDS[:2] for count in (1, 2, 4, 8)))


def _those(words: Iterable[str], begun: str) -> list[str]:
    return sorted(word for word in words if word.startswith(begun))


def files(begun: str, ending: str) -> list[str]:
    """Complete a path in a shell: return folders, and files of type `ending`, whose paths start with `begun`."""
    folder = Path(begun) if begun.endswith("/") else Path(begun).parent
    found = [path for path in folder.glob("[!.]*") if path.is_dir() or path.suffix == ending]
    return _those((f"{path}/" if path.is_dir() else str(path) for path in found), begun)


def run_folders(incomplete: str) -> list[str]:
    """Return the folders of the runs in `runs/` that start with `incomplete`, newest first."""
    folders = [str(path.parent) for path in sorted(Path("runs").glob("*/run.json"), reverse=True)]
    return [folder for folder in folders if folder.startswith(incomplete)]


def runs_here(incomplete: str) -> list[str]:
    """Return the names of the runs in `runs/` that start with `incomplete`, newest first."""
    return [folder.removeprefix("runs/") for folder in run_folders(f"runs/{incomplete}")]


OF_OPTIONS: dict[str, Callable[[str], list[str]]] = {
    "job": lambda incomplete: _those(BUILT_IN, incomplete) + files(incomplete, ".py"),
    "settings": lambda incomplete: _those((f"{field.name}=" for field in fields(Plan)), incomplete),
    "devices": lambda incomplete: _those(DEVICES, incomplete),
    "plan": lambda incomplete: files(incomplete, ".toml"),
    "resume": run_folders,
    "weights": run_folders,
    "log": lambda incomplete: _those(TRACKERS, incomplete),
}
"""The functions that complete the values of options in a shell, by the field of the options dataclass."""
