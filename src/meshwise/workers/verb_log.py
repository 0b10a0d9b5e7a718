"""Log a rank's verbs in shared memory, where its launcher reads them.

A verb is a call that all ranks make together, in the same order.

The log is a file that is mapped into memory: logging a verb costs about a microsecond and no system call, and the
launcher can read a rank's last verb while the rank waits in a collective, and after the rank was killed.

    header       number of verbs; if a loop was left since the last verb, its line and number of batches
    ring         for each of the newest verbs: its line, how often that line was called, a checksum of all verbs up
                 to this one, and the loop that was left just before it
    lines        one per line of the user's program that calls a verb: the verb, and file and line number
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from meshwise.spec.user_code import is_users, place

HEADER, ENTRY = struct.Struct("<QII"), struct.Struct("<IIIII")
SLOTS = 4096
LINES = HEADER.size + SLOTS * ENTRY.size
BATCH = "batch"
"""The name of the call by which a loop asks for its next batch."""
FACTOR, MASK = 1_000_003, (1 << 32) - 1  # for the checksum: a polynomial in FACTOR, modulo 2^32
NOWHERE = (0, 0)
UNKNOWN: tuple[int, None, int, list[int]] = 1, None, 0, []
in_progress: set[str] = set()
"""What this rank has begun but not finished, such as an epoch. If it exited now, the other ranks would wait for it."""


@dataclass(frozen=True)
class VerbTrail:
    """A rank's log of verbs, as read from the rank's file at one moment.

    left: says which loop was left since the last call, and after how many batches. Empty if none was.
    """

    count: int
    left: str
    _data: bytes
    _lines: list[str]

    @property
    def oldest(self) -> int:
        """The number of the oldest call that is surely still in the log."""
        return max(1, self.count - SLOTS // 2)

    def checksum(self, number: int) -> int:
        """Return the checksum of calls 1 to `number`. It is equal on ranks that have made the same calls."""
        return self._entry(number)[2]

    def verb(self, number: int) -> str:
        """Describe call `number` of this rank, counted from 1, such as `mw.sum at train.py:31 (call 2)`."""
        line, times, *_ = self._entry(number)
        name, _, where = self._lines[line].partition("\t")
        at = f" at {where}" if where else ""
        if name == BATCH:
            return f"batch {times} of the loop{at}"
        return f"{name}{at}" + (f" (call {times})" if times > 1 else "")

    def left_before(self, number: int) -> str:
        """Say which loop was left just before call `number`, as `left` does."""
        return _left(self._lines, *self._entry(number)[3:])

    def _entry(self, number: int) -> tuple[int, ...]:
        return ENTRY.unpack_from(self._data, HEADER.size + (number - 1) % SLOTS * ENTRY.size)


def _left(lines: list[str], line: int, batches: int) -> str:
    where, noun = lines[line].partition("\t")[2], "batch" if batches == 1 else "batches"
    return f"left its loop at {where} after {batches} {noun} and " if batches else ""


def read_trail(path: Path) -> VerbTrail | None:
    """Read the verbs that a rank has logged to a file. None if it has logged none."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < LINES:
        return None
    count, left, batches = HEADER.unpack_from(data)
    lines = data[LINES:].decode(errors="replace").split("\n")
    return VerbTrail(count, _left(lines, left, batches), data, lines) if count else None


class VerbLog:
    """Logs the verbs of this rank. If several threads call verbs, only the calls of the first thread are
    logged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("w+b") as file:
            file.truncate(LINES)
            self._map = mmap.mmap(file.fileno(), LINES)
        self._counts, self._words = memoryview(self._map)[:8].cast("Q"), memoryview(self._map)[:LINES].cast("I")
        self.newest: dict[str, tuple[int, CodeType | None, int, list[int]]] = {}  # the newest call of each verb
        self._thread = 0
        self._lines: dict[tuple[str, int, int], list[int]] = {}  # values: line's index, verb's crc32, number of calls
        self._codes: list[CodeType] = []  # kept alive, so that their ids are not reused
        self._count = self._checksum = 0
        self._left = NOWHERE

    def line(self, verb: str, frame: FrameType | None) -> list[int]:
        """Return [index, crc32 of the verb, number of calls] of the source line that calls the verb."""
        self._thread, depth = threading.get_ident(), 1
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame, depth = frame.f_back, depth + 1
        at = (verb, 0, 0) if frame is None else (verb, id(frame.f_code), frame.f_lasti)
        line = self._lines.get(at)
        if line is None:
            line = self._lines[at] = [len(self._lines), zlib.crc32(verb.encode()), 0]
            self._codes += [frame.f_code] if frame is not None else []
            with self._path.open("ab") as file:
                where = "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)
                file.write(f"{verb}\t{where}\n".encode())
        if frame is not None:
            self.newest[verb] = depth, frame.f_code, frame.f_lasti, line
        return line


_log: VerbLog | None = None


def begin(path: Path) -> None:
    """Start to log the verbs of this process to a file."""
    global _log
    _log = VerbLog(path)


def end() -> None:
    """Stop logging the calls of this process."""
    global _log
    _log = None


def log_verb(verb: str, *which: int, log: VerbLog | None = None) -> None:
    """Log a verb. Does nothing if no log was begun.

    This function runs several times in each step. For speed, it calls few other functions.

    verb: the name of the call, such as `batch`.
    which: numbers of the call that must be equal on all ranks, such as the number of the batch. The last number is
        logged as how often the line was called.
    log: the log to write to. By default, the log of this process.
    """
    log, here = log or _log, threading.get_ident()
    if log is None or (log._thread or here) != here:
        return
    depth, code, lasti, line = log.newest.get(verb, UNKNOWN)  # guess: the same line calls again, at the same depth
    try:
        frame = sys._getframe(depth)
    except ValueError:  # the stack is shallower than last time
        frame, code = sys._getframe(1), None  # not depth 0: a frame in its own variable would stay alive
    line = line if frame.f_code is code and frame.f_lasti == lasti else log.line(verb, sys._getframe(1))
    line[2] += 1
    checksum = log._checksum * FACTOR + line[1]
    for number in which:
        checksum = checksum * FACTOR + number
    log._checksum = checksum = checksum & MASK
    words, at = log._words, (HEADER.size + log._count % SLOTS * ENTRY.size) // 4
    words[at], words[at + 1], words[at + 2] = line[0], which[-1] if which else line[2], checksum
    words[at + 3], words[at + 4] = log._left
    log._counts[0] = log._count = log._count + 1
    log._left, words[2], words[3] = NOWHERE, 0, 0


def left_loop(batches: int) -> None:
    """Log that this process leaves a loop before its end, after `batches` batches."""
    log = _log
    if log is not None and threading.get_ident() == log._thread:
        log._left = (log.line("left", sys._getframe(1))[0], batches)
        HEADER.pack_into(log._map, 0, log._count, *log._left)


os.register_at_fork(after_in_child=end)
