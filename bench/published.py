"""A scoreboard: estimates of training runs that others published, by catalog figures alone, beside what they measured.

    python bench/published.py RUNS.csv [--minutes 30] [--set llm-foundry] [--score] [--write]

Model, plan and machine are built from each row (published_rows.py). A row is traced with two depths, and time and
memory are taken to the row's depth in a straight line: the blocks in the middle are alike. Of a pipeline one stage is
traced, and stages take turns by the arithmetic of their schedule. What was traced is kept (published_pieces.py), and
priced anew each time, so that the score follows the constants in a minute. The script goes on where it stopped; rows
come in an order drawn by a seed. --score traces nothing. --write puts the tables into docs/internals/accuracy.md.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import random
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keep import RESULTS, keep
from published_pieces import estimate, kept_piece, trace_piece
from published_rows import Case, Row, Unusable, case_of, family_of
from published_score import scoreboard, table, write

from meshwise.planner.constants import digest
from meshwise.spec.errors import MeshwiseError


def main() -> None:
    """Trace what is not kept yet, as long as there is time; then price all, and score."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--set", action="append", default=[], help="data sets, in turns; all by default")
    parser.add_argument("--rows", type=int, help="of each data set at most so many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with options.runs.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["quality"] in "AB"]
    ordered = _ordered(rows, options.set, options.rows, options.seed)
    failed: dict[int, str] = {}
    if not options.score:
        _trace_all(ordered, options.minutes, failed)
    found = {id(row): failed.get(id(row)) or _found(row) for row in ordered}
    result = scoreboard(ordered, lambda row: _as_found(found[id(row)]))
    fitted = RESULTS / f"fit-{options.runs.stem}.json"
    if fitted.exists():
        result["left out"] = json.loads(fitted.read_text())["left out"]
    print(table(result))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about: dict[str, Any] = {"constants": digest(), "commit": commit, "file": options.runs.name}
    about["sha256"] = hashlib.sha256(options.runs.read_bytes()).hexdigest()[:16]
    keep(f"published-{options.runs.stem}", about | result)
    if options.write:
        write(Path(__file__).parents[1] / "docs" / "internals" / "accuracy.md", result)


def _trace_all(rows: Sequence[Row], minutes: float, failed: dict[int, str]) -> None:
    began, reasons = time.monotonic(), dict[tuple[str, int], str]()
    for row in rows:
        try:
            case = case_of(row)
        except Unusable:
            continue
        for depth in case.depths:
            if time.monotonic() - began > minutes * 60:
                return
            if kept_piece(case, depth) is None and not _try(case, depth, row, failed, reasons):
                break


def _try(case: Case, depth: int, row: Row, failed: dict[int, str], reasons: dict[tuple[str, int], str]) -> bool:
    """Trace, or say why it cannot be; what has failed once does so again."""
    key = repr(case.plan(case.traced)) + row["model"] + row["micro_batch"], depth
    if key not in reasons:
        began = time.monotonic()
        try:
            trace_piece(case, depth)
        except MeshwiseError as error:
            reasons[key] = str(error)
        except Exception as error:  # a row that cannot be estimated is named, and the others go on
            reasons[key] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        else:
            name = f"{row['dataset']} {row['model']} mb {row['micro_batch']}"
            print(f"{name}, {depth} deep: {time.monotonic() - began:.1f} s", flush=True)
            return True
        print(f"{row['dataset']} {row['model']}: {reasons[key]}", flush=True)
    failed[id(row)] = reasons[key]
    return False


def _found(row: Row) -> dict[str, Any] | str | None:
    """The estimate, why there is none, or None where it is not traced yet."""
    try:
        case = case_of(row)
        found = estimate(case)
    except KeyError:
        return None
    except (Unusable, MeshwiseError) as error:
        return str(error)
    return found | {"family": family_of(row), "machine": case.machine, "differs": case.differs}


def _as_found(found: Mapping[str, Any] | str | None) -> Mapping[str, Any] | None:
    return {"unusable": found} if isinstance(found, str) else found


def _ordered(rows: Sequence[Row], sets: Sequence[str], most: int | None, seed: int) -> list[Row]:
    names = sets or list(dict.fromkeys(row["dataset"] for row in rows))
    found = []
    for name in names:
        own = [row for row in rows if row["dataset"] == name]
        random.Random(f"{seed} {name}").shuffle(own)
        found.append(own[:most])
    return [row for turn in itertools.zip_longest(*found) for row in turn if row is not None]


if __name__ == "__main__":
    main()
