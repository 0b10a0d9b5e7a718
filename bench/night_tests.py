"""Choose which tests `make test` leaves to `make suite`, from how long each took: tests/night.txt.

    the two commands of `make test` with --durations=0 >LOG, each into a log of its own
    python bench/night_tests.py LOG LOG [--seconds 320]

Besides those on the list the longest go until the others take `--seconds` together. Of each parametrised test the
shortest case stays where it takes at most CASE seconds, and so do the tests of ALWAYS. Claim: `make test` takes at most
five minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

CASE = 6.0
LIST = Path(__file__).parents[1] / "tests" / "night.txt"
ALWAYS = (
    "tests/test_step_calls.py",
    "tests/test_imports.py",
    "tests/docs/test_readme.py",
    "tests/faults/test_restarts.py",
)


def seconds_of(log: str) -> dict[str, float]:
    """Return how long each test took: set-up, call and clean-up."""
    found: dict[str, float] = defaultdict(float)
    for seconds, name in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(tests/.+?) *$", log, re.MULTILINE):
        found[name] += float(seconds)
    return found


def chosen(found: dict[str, float], seconds: float) -> list[str]:
    """Return the longest tests, so that all others take at most `seconds` together."""
    stays: dict[str, str] = {}
    for name in sorted(found, key=found.__getitem__):
        if "[" in name and found[name] <= CASE:
            stays.setdefault(name.partition("[")[0], name)
    left, night = sum(found.values()), []
    for name in sorted(found, key=found.__getitem__, reverse=True):
        if left > seconds and name not in stays.values() and not name.startswith(ALWAYS):
            left -= found[name]
            night.append(name)
    return sorted(night)


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=320)
    given = parser.parse_args()
    found = seconds_of("".join(log.read_text() for log in given.logs))
    night = sorted({*LIST.read_text().splitlines(), *chosen(found, given.seconds)})
    LIST.write_text("\n".join(night) + "\n")
    rest = sum(taken for name, taken in found.items() if name not in night)
    print(f"{len(night)} tests are left to make suite; the others that took long enough to be listed take {rest:.0f} s")


if __name__ == "__main__":
    main()
