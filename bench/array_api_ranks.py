"""The public array API suite over ranks: each rank runs the same tests on the same examples.

    python bench/array_api_ranks.py SUITE [--ranks 2 3] [--examples 3] [--limit 60] [-k WORDS]

SUITE: as of bench/array_api.py. Examples are derandomised, so that all ranks draw the same; none is shrunk, and a test
has `--limit` seconds. Every number and array that a test reads goes into a checksum. Goals: each test that passes on
virtual devices passes over ranks, and its checksum is the same on each rank, and on virtual devices. A test on which
the ranks part ends its processes at the limit, is counted as failed, and the pass goes on behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from keep import keep

from tests.pool import CaseFailed, Pool

HERE = Path(__file__).parents[1] / "tests" / "programs"
READS = ("numpy", "item", "__array__", "__float__", "__int__", "__bool__", "__complex__", "__index__")


def run_suite(suite: str, places: int, options: list[str], done: list[str], log: str, limit: float) -> int:
    """In a worker: the tests that are not done; what became of each is a line of `log`-RANK. Gives pytest's status."""
    os.environ |= {"PLACES": str(places), "ARRAY_API_TESTS_MODULE": "array_api_sharded"}
    os.environ["ARRAY_API_TESTS_VERSION"] = "2025.12"
    os.chdir(suite)
    sys.path[:0] = [suite, str(HERE)]
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    import meshwise as mw
    from meshwise.arrays.moves import agreed

    kept = Path(f"{log}-{mw.rank()}").open("a")  # noqa: SIM115
    array, read, said = mw.array_namespace(f"{places}xcpu").ndarray, [0, 0], []
    space = mw.array_namespace(f"{places}xcpu").space

    def counted(method: Any) -> Any:
        def call(*given: Any, **how: Any) -> Any:
            found = method(*given, **how)
            text = found.tobytes() if hasattr(found, "tobytes") else repr(found).encode()
            read[:] = [zlib.crc32(text, read[0]), read[1] + 1]
            return found

        return call

    for name in READS:
        setattr(array, name, counted(getattr(array, name)))

    class Recorder:
        @pytest.hookimpl(trylast=True)
        def pytest_configure(self) -> None:
            settings.register_profile(
                "ranks",
                settings.get_profile("array-api-tests"),
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
                database=None,
            )
            settings.load_profile("ranks")

        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            items[:] = [item for item in items if item.nodeid not in done]

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            print(json.dumps({"test": nodeid}), file=kept, flush=True)
            faulthandler.dump_traceback_later(limit, exit=True, file=kept)
            read[:], said[:] = [0, 0], []
            random.seed(zlib.crc32(nodeid.encode()))  # hypothesis shuffles single examples by it

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.outcome != "passed":
                crash = getattr(report.longrepr, "reprcrash", None)
                said.append(f"{report.outcome}: {crash.message.splitlines()[0][:200] if crash else ''}")

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            own = tuple(read)
            sums = agreed(space, [own[0]] * (len(space.here) if not space.over_ranks else 1), "the end of a test")
            faulthandler.cancel_dump_traceback_later()
            row = {"test": nodeid, "outcome": said[0] if said else "passed", "crc": own[0], "reads": own[1]}
            print(json.dumps(row | {"alike": len(set(sums)) == 1}), file=kept, flush=True)

    command = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist", "array_api_tests", *options]
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        return int(pytest.main(command, plugins=[Recorder()]))


def rows_of(log: str, rank: int) -> tuple[dict[str, dict[str, Any]], str]:
    """The tests that a rank finished, and the one that it is in."""
    found, last = {}, ""
    path = Path(f"{log}-{rank}")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith('{"test"'):
            row = json.loads(line)
            last = "" if "outcome" in row else row["test"]
            if "outcome" in row:
                found[row["test"]] = row
    return found, last


def outcomes(suite: Path, places: int, ranks: int, asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What became of each test, of all ranks together. ranks of 1: on virtual devices."""
    options = [f"--max-examples={asked.examples}", "--derandomize", "--disable-deadline", "--tb=short"]
    options += ["-k", asked.words] if asked.words else []
    ended: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log, pool = str(Path(folder, "log")), Pool(ranks)
        while True:
            done = sorted(ended.keys() | set.intersection(*(set(rows_of(log, rank)[0]) for rank in range(ranks))))
            try:
                pool.run(run_suite, str(suite), places, options, done, log, asked.limit, timeout=10**6)
                break
            except CaseFailed as failure:
                within = {test for test in (rows_of(log, rank)[1] for rank in range(ranks)) if test} - ended.keys()
                if not within:
                    raise
                logs = [Path(f"{log}-{rank}").read_text() for rank in range(ranks)]
                over = any("Timeout (" in text.rpartition('{"test"')[2] for text in logs)
                why = f"not done in {asked.limit:g} s" if over else f"ended its processes: {failure.text[:200]}"
                for test in within:
                    ended[test] = {"outcome": why, "alike": False}
                    print(f"{test}: {why}", flush=True)
        pool.close()
        every = [rows_of(log, rank)[0] for rank in range(ranks)]
    rows = {test: row for test, row in every[0].items() if all(test in own for own in every)}
    for test, row in rows.items():
        differing = {own[test]["outcome"] for own in every} - {row["outcome"]}
        if differing:
            row |= {"outcome": f"{row['outcome']}, on another rank {sorted(differing)}"}
    return rows | ended


def main() -> None:
    """Run on virtual devices and over ranks, compare, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--examples", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60)
    parser.add_argument("-k", dest="words", default="")
    asked = parser.parse_args()
    result: dict[str, Any] = {"examples": asked.examples, "passes": {}}
    for ranks in asked.ranks:
        begin = time.monotonic()
        virtual, found = outcomes(asked.suite, ranks, 1, asked), outcomes(asked.suite, ranks, ranks, asked)
        passed = {test for test, row in virtual.items() if row["outcome"] == "passed"}
        lost = {t: found.get(t, {}).get("outcome", "absent") for t in virtual if t in passed}
        lost = {test: outcome for test, outcome in lost.items() if outcome != "passed"}
        differing = sorted(test for test, row in found.items() if not row["alike"])
        both = [test for test in passed if test in found and test not in lost]
        other = sorted(test for test in both if found[test]["crc"] != virtual[test]["crc"])
        row = {"tests": len(found), "passed": sum(own["outcome"] == "passed" for own in found.values())}
        row |= {"passed on virtual devices": len(passed), "values read": sum(found[test]["reads"] for test in both)}
        result["passes"][f"{ranks} ranks"] = row | {
            "lost": lost,
            "checksums differ between ranks": differing,
            "checksums differ from virtual devices": other,
            "seconds": round(time.monotonic() - begin),
        }
        print(json.dumps(result["passes"][f"{ranks} ranks"], indent=1), flush=True)
    if not asked.words:
        keep("array_api_ranks", result)


if __name__ == "__main__":
    main()
