"""Read a cluster's settings for every job from a TOML file.

The site or the user writes this file.

    machine = "8xH100"                     # a node, as `meshwise plan --machine` reads it
    network = "400Gb"                      # what a node can send, one way
    partition = "gpu"
    setup = ["module load cuda/12.4", "source /shared/me/.venv/bin/activate"]
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from meshwise.spec.errors import UsageError, nearest

FILE = "site.toml"
WORDS = {
    "gpus": ("gpus-per-node", "gres", "none"),
    "runtime": ("apptainer", "singularity", "pyxis"),
    "kind": ("", "Job", "JobSet", "TrainJob"),
}
"""The values that a key may have."""
OF_SLURM = ("partition", "account", "qos", "setup", "container", "options")
"""Keys that Kubernetes has no use for."""


@dataclass(frozen=True)
class Site:
    """The default settings of a cluster. A field is "", 0 or an empty tuple if the cluster has no default for it."""

    machine: str = ""
    network: str = ""
    devices: str = ""
    gpus: str = "gpus-per-node"
    gpu_type: str = ""
    gpus_per_node: int = 0
    cpus: int = 0
    memory: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    command: str = ""
    setup: tuple[str, ...] = ()
    container: str = ""
    runtime: str = "apptainer"
    mounts: tuple[str, ...] = ()
    runs: str = ""
    options: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    image: str = ""
    claim: str = ""
    mount: str = ""
    workdir: str = ""
    namespace: str = ""
    queue: str = ""
    kind: str = ""
    shared_memory: str = "8Gi"
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: tuple[str, ...] = ()
    tolerations: tuple[str, ...] = ()
    pull_secret: str = ""
    service_account: str = ""
    secret: str = ""
    file: str = ""


def find_site(named: str | Path | None = None, *, beside: Path = Path()) -> Site:
    """Read the file `named`, or the first site.toml in the current folder, `beside` or the user's config."""
    if named is not None:
        return read_site(Path(named))
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    for path in (Path(FILE), beside / FILE, config / "meshwise" / FILE):
        if path.is_file():
            return read_site(path)
    return Site()


def read_site(path: Path) -> Site:
    """Read the default settings of a cluster from a file. Raises UsageError if the file is unreadable or invalid."""
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--site {path} cannot be read ({error.strerror}).") from None
    except ValueError as error:  # invalid TOML or UTF-8
        raise UsageError(f"{path} is not a valid TOML file ({error}).") from None
    kinds = {field.name: type(field.default) for field in fields(Site) if field.name != "file"}
    for key, value in told.items():
        if key not in kinds:
            raise UsageError(f"{path}: a site file has no key {key}.{nearest(key, kinds)} Use {', '.join(kinds)}.")
        told[key] = _checked(path, key, value, kinds[key])
    site = Site(**told, file=str(path))
    _check(site, path)
    return site


def _checked(path: Path, key: str, value: Any, kind: type) -> Any:
    if kind is tuple and isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = tuple(value)
    if type(value) is not kind:
        shape = {str: "a string in quotes", int: "a whole number", tuple: "a list of strings"}[kind]
        raise UsageError(f"{path}: {key} must be {shape}, but it is {value!r}.")
    for text in value if isinstance(value, tuple) else [value]:
        if isinstance(text, str) and any(ord(letter) < 32 or letter == "\x7f" for letter in text):
            raise UsageError(f"{path}: {key}: {text!r} has a line break or a control character. Remove it.")
    if isinstance(value, int) and value < 0:
        raise UsageError(f"{path}: {key} must be 0 or more, but it is {value}.")
    return value


def _check(site: Site, path: Path) -> None:
    for key, words in WORDS.items():
        if (value := getattr(site, key)) not in words:
            raise UsageError(f"{path}: {key} must be one of {', '.join(filter(None, words))}, but it is '{value}'.")
    if site.mounts and not site.container:
        raise UsageError(f'{path}: mounts need a container. Add container = "image.sif".')
    for pair in site.node_selector:
        if not all(pair.partition("=")):
            raise UsageError(f"{path}: node_selector: '{pair}' must be a label and its value, such as \"gpu=h100\".")
    for key in ("mount", "workdir"):
        if not f"{getattr(site, key)}/".startswith("/"):
            raise UsageError(f"{path}: {key} must be an absolute path in pods, but it is '{getattr(site, key)}'.")
    for name in site.secrets:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UsageError(f"{path}: secrets must be names of environment variables, never their values.")
    for option in site.options:
        if not option.startswith("-"):
            raise UsageError(f"{path}: options: '{option}' must begin with -. Write for example \"--constraint=ib\".")
