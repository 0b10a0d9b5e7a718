"""Share a secret among the processes of one start.

No other process knows the secret. It comes from the environment, or from a file that the processes share.

The file is in the folder of the start. The first process there makes the file, with a new secret, so that no process
waits for a file to appear, which NFS shows up to a minute late; rank 0 adds its addresses. Only an open file that
belongs to this user and that no other user may read is trusted; a link at its path is not followed. A folder above
it may be a link. A user who changes the link can only lead to an older file of this user with the same name.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwise.spec.errors import UsageError

VARIABLE = "MESHWISE_SECRET"
"""The environment variable for a secret of the user's own. It is needed if the processes share no folder."""
LEAST = 32  # minimum number of characters
MAKING_TIMEOUT = 5.0  # seconds for another process to write its new file
PREFIX = ".meshwise-rendezvous-"
MOST = 64 << 10  # maximum size of the file in bytes
SET_ONE = f"give all processes one secret: export {VARIABLE}=$(openssl rand -hex 32)"


@dataclass(frozen=True)
class Secret:
    """A secret by which the processes that were started together recognize each other, so that no other process can
    join them."""

    value: bytes = field(repr=False)
    path: Path
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Where the secret comes from, in words for the user."""
        return VARIABLE if os.environ.get(VARIABLE) else f"from {self.path}"

    def tell(self, **facts: Any) -> None:
        """Append facts, such as the port of rank 0, to the file at `path`."""
        try:
            file = _opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            file = _opened(self.path, os.O_WRONLY | os.O_APPEND)
        with os.fdopen(file, "wb") as writing:
            writing.write(f"\n{json.dumps(facts)}\n".encode())

    def remove(self) -> None:
        """Remove the file at `path`."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def secret_of(name: str, folder: Path) -> Secret:
    """Return the secret of the processes that were started together under a name."""
    path = folder.resolve() / (PREFIX + re.sub(r"[^.\w-]", "_", f"{os.geteuid()}-{name}") + ".json")
    given = os.environ.get(VARIABLE, "").strip()
    if not given:
        return _of_file(name, path)
    if len(given) < LEAST:
        raise UsageError(f"{VARIABLE} has only {len(given)} characters, which is easy to guess: {SET_ONE}.")
    told = dict[str, Any]()
    try:
        with contextlib.suppress(FileNotFoundError):
            told = _read(path)
    except OSError as error:
        raise UsageError(_refused(path, _why(error))) from None
    return Secret(_of(given.encode(), name), path, told)


def _of_file(name: str, path: Path) -> Secret:
    until = time.monotonic() + MAKING_TIMEOUT
    try:
        while time.monotonic() < until:
            with (
                contextlib.suppress(FileExistsError),
                os.fdopen(_opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file,
            ):
                file.write(json.dumps({"secret": secrets.token_hex(32)}).encode() + b"\n")
            with contextlib.suppress(FileNotFoundError):  # another process may remove the new file
                told = _read(path)
                if re.fullmatch("[0-9a-f]{64}", secret := str(told.get("secret"))):
                    return Secret(_of(bytes.fromhex(secret), name), path, told)
            time.sleep(0.02)
    except OSError as error:
        raise UsageError(_refused(path, _why(error))) from None
    raise UsageError(_refused(path, "contains no secret"))


def _of(secret: bytes, name: str) -> bytes:
    """Derive the secret of one start of processes, called `name`, from a longer-lived secret."""
    return hmac.digest(secret, f"start {name}".encode(), "sha256")


def _read(path: Path) -> dict[str, Any]:
    """Return what the file of a secret contains, such as the secret and the port of rank 0."""
    with os.fdopen(_opened(path, os.O_RDONLY), "rb") as file:
        lines = file.read(MOST).splitlines()
    told = dict[str, Any]()
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            told |= fact if isinstance(fact := json.loads(line), dict) else {}
    return told


def _opened(path: Path, flags: int) -> int:
    """Open a file, and return its descriptor.
    Raises OSError with the reason if other users can access the file."""
    # O_NONBLOCK: if a pipe is at this path, do not wait for its other end.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if why := _not_private(os.fstat(descriptor)):
        os.close(descriptor)
        if flags & os.O_EXCL:  # the new file is on a disk without owners or modes
            path.unlink()
        raise OSError(None, why)
    return descriptor


def _not_private(facts: os.stat_result) -> str:
    """Return why an open file is not private to this user, such as `… (owner 0, mode 100644, 1 links)`, or ""."""
    private = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    if private and facts.st_nlink == 1:
        return ""
    found = f"owner {facts.st_uid}, mode {facts.st_mode:o}, {facts.st_nlink} links"
    return f"is not a file of mode 100600 that belongs to user {os.geteuid()} alone ({found})"


def _why(error: OSError) -> str:
    return error.args[1] if error.errno is None else f"cannot be opened ({error.strerror})"


def _refused(path: Path, why: str) -> str:
    return f"{path} {why}, so it is not used. Remove the file, start in another folder, or {SET_ONE}."
