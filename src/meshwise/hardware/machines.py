"""Describe this machine, or one given in words or a file.

Importing torch takes time, so a caller that does not need torch's facts can leave them out.
"""

from __future__ import annotations

from pathlib import Path

from meshwise.hardware.discovery.discover import discover
from meshwise.hardware.discovery.torch_facts import read_torch
from meshwise.hardware.machine_file import machine_from_toml
from meshwise.hardware.views.devices import devices_text
from meshwise.hardware.words import machine_from_words
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Machine
from meshwise.terminal.notebook import shown_by

shown_by(Machine, devices_text)


def find_machine(words: str | Path | None = None, *, torch: bool = True) -> Machine:
    """Return the description of a machine: of this machine by default, of a machine given in words such as `8xH100` or
    `2x8xA100-80GB@200Gb`, or of the machine in a machine file.

    words: None for this machine, a description in words, or the path of a machine file.
    torch: whether to ask torch about this machine too, besides NVML and the system's files.

    Raises UsageError for a part that is not in the catalog, and names the nearest one. Also raises UsageError for an
    invalid machine file.
    """
    if words is None:
        return discover(torch=read_torch() if torch else None)
    if not isinstance(words, str | Path):
        raise UsageError(f"find_machine({words!r}): pass words such as '8xH100', or the path of a machine file.")
    path = Path(words)
    if path.suffix == ".toml" or path.exists():
        return read_machine(path)
    return machine_from_words(str(words))


def read_machine(path: Path) -> Machine:
    """Read a machine file. Raises UsageError if it cannot be read or is not a machine file."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # reading a pipe or a device might never end
        raise UsageError(f"{path} is not a regular file. Write a machine file with meshwise bench --save FILE.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"{path} cannot be read as a machine file ({why}). Write one with meshwise bench --save FILE."
        ) from None
    return machine_from_toml(text, str(path))
