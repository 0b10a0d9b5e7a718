"""Record hashes of a program's files, and refuse later changes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from meshwise.records.files import read_json, write_text
from meshwise.spec.errors import UsageError
from meshwise.spec.words import some

RUN_FILE, CODE = "run.json", "code.json"
"""Files that mark a run folder. code.json lists the files of the program's folder, each with its hash."""
MOST_FILES = 2000


def code_files(word: str) -> dict[str, str]:
    """Return the hash of a program's file and of each Python file beside and below it, by relative path."""
    file = Path(word if word.endswith(".py") else word.rpartition(":")[0])
    if file.suffix != ".py" or not file.is_file():
        return {}
    folder = file.resolve().parent
    return {str(path.relative_to(folder)): _hash(path) for path in islice(_files(folder, file.resolve()), MOST_FILES)}


def write_code(folder: Path, word: str) -> None:
    """Record the hashes of a program's Python files (see `code_files`) in its run folder.

    word: the program, such as `train.py` or `train.py:job`.
    """
    write_text(folder / CODE, "{}")  # mark the folder as a run folder first: `code_files` skips run folders
    write_text(folder / CODE, json.dumps(code_files(word), indent=1) + "\n")


def changed_code(folder: Path, word: str) -> list[str]:
    """Return the program's files that were changed, removed or added after `write_code` recorded their hashes in a run
    folder."""
    kept = read_json(folder / CODE)
    now = code_files(word) if kept else {}
    return sorted(name for name in {*kept, *now} if kept.get(name) != now.get(name))


def refuse_changed_code(folder: Path, word: str) -> None:
    """Raise UsageError if a program's Python files have changed since `meshwise submit` recorded their hashes in the
    run folder.

    word: the program, such as `train.py` or `train.py:job`.
    """
    if changed := changed_code(folder, word):
        raise UsageError(
            f"{some(changed)} changed after meshwise submit checked this run. Submit it again: meshwise submit {folder}"
        )


def _files(folder: Path, first: Path) -> Iterator[Path]:
    yield first
    for root, folders, files in os.walk(folder):
        here = Path(root)
        if (here / RUN_FILE).exists() or (here / CODE).exists():
            folders.clear()
            continue
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "__")) and not (here / name / "pyvenv.cfg").exists() and name != "node_modules"
        )
        for path in (here / name for name in sorted(files)):
            if path != first and path.suffix == ".py" and path.is_file():
                yield path


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
