"""Make temporary folders, and remove those of killed commands.

The next command of the same user removes the folders that a killed command has left.

Each folder holds a file that its owners keep locked as long as they live. The kernel releases the lock when the last
owner ends, so process ids, which differ between containers, play no part. A folder gets its name after it is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from meshwise.spec.errors import UsageError

PREFIX, OWNED = "meshwise-", "owned.lock"


@contextlib.contextmanager
def scratch_folder(purpose: str = "") -> Iterator[Path]:
    """Make a folder that is removed, with its contents, after the `with` block. purpose: a word in the folder's
    name."""
    folder, owned = made_folder(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        owned.close()


def made_folder(purpose: str = "") -> tuple[Path, IO[bytes]]:
    """Make a temporary folder. Return the folder and its lock file, which protects it from `sweep` while it is open.

    Raises UsageError if no folder can be made.
    """
    prefix = PREFIX + (f"{purpose}-" if purpose else "")
    try:
        sweep(tempfile.gettempdir())
        made = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
        owned = own(made)
        folder = made.rename(made.with_name(made.name.removeprefix(".")))
    except OSError as error:
        where = tempfile.tempdir or os.environ.get("TMPDIR", "TMPDIR")
        raise UsageError(
            f"a temporary folder cannot be created in {where} ({error.strerror}). Set TMPDIR to a folder that is "
            "writable and has room."
        ) from None
    return folder, owned


def own(folder: Path) -> IO[bytes]:
    """Protect a temporary folder of meshwise from `sweep`, which removes the folders of commands that have ended. The
    folder is protected as long as the returned file, its lock file, is open in some process."""
    file = (folder / OWNED).open("ab")
    with contextlib.suppress(OSError):  # without file locks, `sweep` removes nothing
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


@functools.cache
def sweep(parent: str) -> None:
    """Remove from `parent` the folders that commands of this user have made and that have no living owner. Once."""
    for folder in Path(parent).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            facts = folder.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
                with (folder / OWNED).open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError while a process uses the folder
                shutil.rmtree(folder, ignore_errors=True)
