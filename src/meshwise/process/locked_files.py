"""Restrict a process's writes to some folders, by Linux's Landlock.

The restriction also holds for processes that this one starts, and needs no privileges.

Code that bypasses the view of scratch_files.py (C++, Rust, other programs) then fails if it would change a file of the
user. Interface: docs.kernel.org/userspace-api/landlock.html; tests in tests/process/test_scratch_files.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, of the same number on every processor since 5.0
_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH
_NO_NEW_PRIVS = 38  # linux/prctl.h
_RIGHTS = sum(1 << bit for bit in (1, 4, 5, 7, 8, 10, 12, 13, 14))
"""Landlock's bits of the restricted rights: write or truncate files; make, remove or move files, folders and links."""
_OLDEST = 3  # the version that knows all of them, Linux 6.2


def can_lock() -> bool:
    """Check whether this system supports Landlock."""
    return sys.platform == "linux" and _system(_CREATE, None, 0, _VERSION) >= _OLDEST


def lock_files(folders: Iterable[str]) -> None:
    """Let this thread, and processes that it starts, write only below `folders` from now on. This cannot be undone."""
    rules = _system(_CREATE, struct.pack("Q", _RIGHTS), 8, 0)
    for folder in folders:
        with contextlib.suppress(OSError):
            opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            _system(_ADD, rules, _BENEATH, struct.pack("=Qi", _RIGHTS, opened), 0)
            os.close(opened)
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _system(_RESTRICT, rules, 0)
    os.close(rules)


def _system(number: int, *arguments: bytes | int | None) -> int:
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *values))
