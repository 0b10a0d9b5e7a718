"""Expand Slurm's lists of hosts and of tasks."""

from __future__ import annotations

import itertools
import re

from meshwise.spec.errors import UsageError

_NAME = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
MOST_HOSTS = 100_000


def host_list(text: str) -> tuple[str, ...]:
    """Expand `rack[0-1]n[01-02],big` to rack0n01, rack0n02, rack1n01, rack1n02, big."""
    names = _NAME.findall(text)
    if not names or ",".join(names) != text.strip():
        raise _refused(text)
    return tuple(itertools.chain.from_iterable(_expanded(name, text) for name in names))


def _expanded(name: str, text: str) -> list[str]:
    parts = [_numbers(part[1:-1], text) if part[0] == "[" else [part] for part in re.findall(r"\[.*?\]|[^\[]+", name)]
    return ["".join(each) for each in itertools.product(*parts)]


def _numbers(ranges: str, text: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or last < first or last - first > MOST_HOSTS:
            raise _refused(text)
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found


def _refused(text: str) -> UsageError:
    return UsageError(f"{text!r} is not a Slurm list of hosts, such as n1 or gpu[03-07,9],big1.")


def tasks_of_nodes(text: str) -> tuple[int, ...]:
    """Expand Slurm's counts of tasks: `4(x2),3` means 4, 4 and 3 on three nodes. Raises UsageError for other text."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise UsageError(f"{text!r} is not a Slurm count of tasks, such as 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or "1")
    return tuple(counts)
