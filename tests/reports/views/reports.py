"""Reports to draw: of runs that were played from a schedule, and windows made by hand."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType

from meshwise.records import folder as names
from meshwise.reports.analyse import report_of
from meshwise.reports.arrivals import arrival_table
from meshwise.reports.run_report import Bar, Report, StepWindow
from meshwise.reports.spans import KIND, KINDS, LANE, LANES, VERSION, Timeline, pack
from meshwise.reports.step_windows import window_of
from tests.reports.schedules import Schedule, Works, delayed, even, jittered, played, timeline_of

COLUMNS = ("start", "end", "step", "bytes", "collective")
MANY_DEVICES = tuple(f"cuda:{rank}" for rank in range(64))


def report_on(ranks: int, works: Works | None = None, seed: int = 0, **changes: Any) -> Report:
    """A run of 40 steps on devices cuda:0 and on, whose last rank is late in its forward; `changes` to its fields."""
    works = works or delayed(jittered(even(), seed), ranks - 1, "forward", 6.0)
    report = report_of(played(Schedule(ranks=ranks), works), "runs/20261121-140502-gpt")
    devices = [
        dataclasses.replace(
            rank,
            device=MANY_DEVICES[rank.rank],
            peak_memory=(61.2 + rank.rank / 10) * 2**30,
            memory={"allocated": (61.2 + rank.rank / 10) * 2**30, "reserved": 70 * 2**30},
        )
        for rank in report.ranks
    ]
    facts: dict[str, Any] = {
        "title": "gpt-125m",
        "ranks": devices,
        "samples_per_second": 12_345.6,
        "error_seconds": 19e-6,
    }
    return dataclasses.replace(report, **(facts | changes))


def bar(rank: int, kind: str, start: float, seconds: float, lane: str = "main", step: int = 1, **more: Any) -> Bar:
    """One bar of a window made by hand."""
    facts: dict[str, Any] = {"name": "", "bytes": 0, "collective": -1} | more
    return Bar(rank=rank, lane=lane, kind=kind, step=step, start=start, seconds=seconds, **facts)


def window(*bars: Bar) -> StepWindow:
    """The window of a timeline whose spans are these bars, times in s."""
    rows = [
        (b.rank, KIND[b.kind], LANE[b.lane], int(b.kind == "communication"), b.step, *_ends(b), 0, b.collective)
        for b in bars
    ]
    spans = timeline_of(rows, max(b.rank for b in bars) + 1).spans
    names = ("", "all-reduce")
    return window_of("typical", spans, names, arrival_table(spans, names))


def _ends(bar: Bar) -> tuple[int, int]:
    return round(bar.start * 1e9), round((bar.start + bar.seconds) * 1e9)


def printed(what: RenderableType, width: int = 80, encoding: str = "utf-8", **options: Any) -> str:
    """What a console of that width shows, without colours where `options` do not ask for them."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding)
    Console(file=file, width=width, **({"force_terminal": False} | options)).print(what)
    file.flush()
    return raw.getvalue().decode(encoding)


def plain(text: str) -> str:
    """Text without the codes of a terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def write_folder(folder: Path, timeline: Timeline, steps: int, status: str = "running", half: bool = False) -> None:
    """The folder of a run that has come so far: a block a step in the log of each rank, as workers write them.

    half: the last block of each log is only half written.
    """
    began = 1_800_000_000.0
    ended = None if status == "running" else began + float(timeline.spans["end"].max()) / 1e9
    sessions = [{"began": began, "ended": ended, "status": status}]
    (folder / names.SPANS).mkdir(parents=True, exist_ok=True)
    for rank in timeline.ranks:
        spans = timeline.of_rank(rank.rank)
        pairs = sorted({(int(s["kind"]), int(s["lane"]), int(s["name"])) for s in spans})
        head = {"log": VERSION, "rank": rank.rank, "world": len(timeline.ranks), "device": "cpu", "host": "here"}
        lines: list[dict[str, Any]] = [head | {"unix": began, "clock": 0}]
        for step in range(1, steps + 1):
            rows = [
                [pairs.index((int(s["kind"]), int(s["lane"]), int(s["name"]))), *(int(s[name]) for name in COLUMNS)]
                for s in spans[spans["step"] == step]
            ]
            block: dict[str, Any] = {"spans": len(rows), "data": pack(np.array(rows, dtype=np.int64))}
            if step == 1:
                block["names"] = [(KINDS[kind], LANES[lane], timeline.names[name]) for kind, lane, name in pairs]
            lines.append(block)
        if ended is not None:
            lines.append({"end": int(timeline.spans["end"].max()), "status": status})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / names.SPANS / f"rank{rank.rank}.jsonl").write_text(text[: -len(text) // 100] if half else text)
    # Last, as a launcher does: who reads that the run is over finds the logs whole.
    names.write_run(folder, {"job": "gpt-125m", "world": len(timeline.ranks), "status": status, "sessions": sessions})
