"""Show a run's report on one screen, the verdict first.

The evidence for the verdict follows.

If the report does not fit on the screen, its least important parts are left out; in a file or a pipe, none are. No
number is ever cut. For more than MOST_ROWS devices, the table of devices has each column's minimum, median and maximum,
and the devices that stand out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

from rich.console import RenderableType
from rich.text import Text

from meshwise.reports.run_report import COMPUTING, OUTSIDE_STEPS, RankReport, Report
from meshwise.reports.views.gantt_text import gantt_text
from meshwise.spec.units import bytes_text, count_text, percent_text, plural, rate_text, seconds_text
from meshwise.terminal.kind_marks import GLUE, MARKS, legend, style_of
from meshwise.terminal.screen import Drawn, Screen, spaced
from meshwise.terminal.table import Bar, Cell, columns_lines, table_lines

STATUS_STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow", "failed": "bold red"}
WHOLE_TITLE = 30  # a title is cut to no fewer characters, even if the line must then wrap
MOST_MISSING = 3
EMPTY_LINES, FEWEST_GANTT_ROWS = 3, 2
MOST_GANTT_RANKS = 16
MOST_GANTT_STEPS = 4
MOST_ROWS = 8
MOST_OUTLIERS = 4
FOUND = "bold #ff5f00"
BAR, LEAST_BAR, MOST_BAR = "its step", 10, 60
OF_STEP = tuple(kind for kind in MARKS if kind not in OUTSIDE_STEPS)
# Columns to drop, in this order, if the table is too wide. The first two columns always stay.
LESS_NEEDED = ("last", BAR, "cost", "memory", "wait", "comm", "compute")
SPREAD: Mapping[str, Callable[[Sequence[float]], float]] = {"min": min, "median": median, "max": max}
COLUMNS: Mapping[str, tuple[Callable[[float], str], Callable[[RankReport], float | None]]] = {
    "step": (seconds_text, lambda r: r.step_seconds if r.steps else None),
    "compute": (percent_text, lambda r: sum(r.step_shares[k] for k in COMPUTING) if r.step_shares else None),
    "comm": (percent_text, lambda r: r.step_shares.get("communication")),
    "wait": (percent_text, lambda r: r.step_shares.get("waiting")),
    "last": (lambda times: f"{count_text(times)}×", lambda r: r.last_steps if r.sync_points else None),
    "cost": (seconds_text, lambda r: r.straggler_seconds if r.sync_points else None),
    "memory": (bytes_text, lambda r: r.peak_memory),
}
"""The columns of numbers: how a number is written, and which number of a rank it is. The number is None if unknown."""


def report_text(report: Report, width: int | None = None, height: int | None = None) -> RenderableType:
    """Draw the report in at most `height` lines."""
    return Drawn(lambda screen: _lines(report, screen, height or screen.height), width)


def _lines(report: Report, screen: Screen, height: int | None) -> list[Text]:
    """Return up to `height` lines of the report."""
    width = screen.width
    head = screen.wrap(_title(report, width), *_verdict(report))
    table, stages = rank_table(report, width), _stages(report, width)
    kinds = [kind for kind in OF_STEP if report.kinds.get(kind, 0.0) > 0]
    marks = screen.wrap(legend(kinds)) if table and kinds else []
    between = [_predicted(report, screen), _attempts(report, width)]
    last = screen.wrap(*_goodput(report), *_advice(report), *_missing(report), *_clocks(report))
    last += screen.wrap(*(Text(f"{name:8} {text}", "dim") for name, text in report.about.items()))
    rest = [head, table, stages, marks, *between, last]
    gantt = _gantt(report, width, math.inf if height is None else height - sum(map(len, rest)))
    first = [table, stages, gantt + marks] if gantt else [table + marks, stages]
    return spaced([head, *first, *between, last], height)[:height]


def _verdict(report: Report) -> list[Text]:
    """Return the headline and the verdict, as one or two lines."""
    begins = report.headline.rstrip(".")
    if not begins:
        return [Text(report.verdict, "bold")]
    if report.verdict.startswith(begins):  # the verdict begins with the headline: show it once
        return [Text(begins, "bold").append(report.verdict.removeprefix(begins), "not bold")]
    return [Text(report.headline, "bold"), Text(report.verdict)]


def _title(report: Report, width: int) -> Text:
    """Return the title line: `mnist-mlp finished · 938 steps of 2.7 ms · 16,422 samples/s · 13.3 s in all`."""
    facts = []
    if report.steps:
        facts.append(f"{plural(report.steps, 'step')} of {seconds_text(report.step_seconds)}")
    if report.samples_per_second is not None:
        facts.append(f"{rate_text(report.samples_per_second)} samples/s")
    facts.append(f"{seconds_text(report.wall_seconds)} {'so far' if report.status == 'running' else 'in all'}")
    source = "" if report.source == "measured" else f"{report.source} "
    rest = "".join(f" · {fact}" for fact in facts)
    room = max(width - len(f" {source}{report.status}{rest}"), WHOLE_TITLE)
    title = report.title if len(report.title) <= room else "…" + report.title[1 - room :]
    text = Text(title, "bold").append(" ").append(source)
    return text.append(report.status, STATUS_STYLES.get(report.status, "")).append(rest, "not bold")


def _goodput(report: Report) -> list[Text]:
    """Return a line with the shares of the wall time: useful time first, then the losses, the largest first."""
    waits = sorted((part for part in report.waiting if part.share >= 0.005), key=lambda part: -part.seconds)
    of_waiting = ", ".join(f"{part.name} {percent_text(part.share)}".replace(" ", GLUE) for part in waits)
    rest = sorted(report.goodput[1:], key=lambda part: -round(100 * part.share))
    facts = [
        f"{share} % {part.name}" + (f" ({of_waiting})" if part.name == "waiting" and of_waiting else "")
        for part in [*report.goodput[:1], *rest]
        if (share := round(100 * part.share))
    ]
    return [Text("goodput  " + " · ".join(facts))] if facts else []


def _missing(report: Report) -> list[Text]:
    more = len(report.missing) - MOST_MISSING
    lines = [Text(f"missing  {sentence}", "yellow") for sentence in report.missing[:MOST_MISSING]]
    return [*lines, Text(f"missing  and {more} more", "yellow")] if more > 0 else lines


def _advice(report: Report) -> list[Text]:
    return [Text("try      ", "green").append(f.advice, "default") for f in report.findings[:1] if f.advice]


def _stages(report: Report, width: int) -> list[Text]:
    """Return a table of the pipeline's stages, or [] if there is no pipeline."""
    rows: list[list[Cell]] = []
    for stage in report.pipeline.stages if report.pipeline else ():
        times = (stage.forward_seconds, stage.backward_seconds, stage.forward_seconds + stage.backward_seconds)
        rows.append([str(stage.stage), ",".join(map(str, stage.ranks)), *map(seconds_text, times)])
    titles = ["stage", "ranks", "forward", "backward", "a microbatch"]
    return table_lines(titles, rows, width, left=(0, 1)) if rows else []


def _attempts(report: Report, width: int) -> list[Text]:
    """Return a table of the attempts of the run, or [] if there was only one."""
    rows: list[list[Cell]] = []
    for one in report.attempts:
        before = f"{seconds_text(one.before)}{' in the queue' if one.queued else ''}" if one.before else ""
        place = ", ".join(filter(None, (one.launched, plural(one.devices, "device") if one.devices else "")))
        steps = ["–" if count is None else str(count) for count in (one.from_step, one.steps_lost)]
        rows.append([str(one.number), one.began, before, place, seconds_text(one.seconds), *steps, one.ended])
    titles = ["attempt", "began", "after", "on", "lived", "from step", "done again", "ended"]
    return table_lines(titles, rows, width, left=(1, 3, 7)) if len(rows) > 1 else []


def _predicted(report: Report, screen: Screen) -> list[Text]:
    """Return a sentence and a table that compare the prediction for the run's plan with the measurement."""
    if report.predicted is None:
        return []
    rows: list[list[Cell]] = []
    for kind in report.predicted.kinds:
        rows.append([kind.name, seconds_text(kind.predicted), seconds_text(kind.measured)])
    for memory in report.predicted.memory:
        measured = "" if memory.measured is None else bytes_text(memory.measured)
        rows.append([f"{memory.name} memory", bytes_text(memory.predicted), measured])
    lines = table_lines(["of a step", "predicted", "measured"], rows, screen.width)
    return [*screen.wrap(Text(report.predicted.sentence)), *lines]


def _clocks(report: Report) -> list[Text]:
    agree = f"clocks   times of different ranks agree to ±{seconds_text(report.error_seconds)}"
    return [Text(agree, "dim")] if len(report.clocks) > 1 else []


def _gantt(report: Report, width: int, room: float) -> list[Text]:
    """Draw a step of usual length, or the few steps that the user chose."""
    running = report.status == "running"  # while the run is running, show its newest steps
    window = next((view for view in report.views if view.name == "last" and running), next(iter(report.views), None))
    if window is None:
        return []
    few = window.last_step - window.first_step < MOST_GANTT_STEPS
    step = None if window.name == "chosen" and few else window.usual_step
    title = f"step {step}, one of {'the newest' if window.name == 'last' else 'usual length'}"
    if step is None:
        one = window.first_step == window.last_step
        title = f"step {window.first_step}" if one else f"steps {window.first_step} to {window.last_step}"
    ranks = [rank.rank for rank in report.ranks]
    many = int(min(len(ranks), MOST_GANTT_RANKS, room - 2))
    if many < min(FEWEST_GANTT_ROWS, len(ranks)):
        return []
    shown = sorted([*dict.fromkeys([*(rank.rank for rank in outliers(report)), *ranks])][:many])
    overlapped = many == len(ranks) and 2 * many + 3 + EMPTY_LINES <= room
    lines = gantt_text(window, shown, width, step=step, overlapped=overlapped)
    some = f", {many} of {len(ranks)} ranks" if many < len(ranks) else ""
    return [Text(f"{title}{some}", "dim"), *lines] if lines else []


def rank_table(report: Report, width: int) -> list[Text]:
    """Draw the table of ranks, in lines of at most `width` characters."""
    if not report.ranks:
        return []
    many = len(report.ranks) > MOST_ROWS
    shown, spread = (outliers(report), SPREAD) if many else (report.ranks, {})
    drawn = [report.kinds if name == "median" else {} for name in spread] + [rank.seconds for rank in shown]
    columns: dict[str, list[Cell]] = {"rank": [*map(Text, spread), *(_name(rank, report) for rank in shown)]}
    for title, (write, read) in COLUMNS.items():
        known = [value for rank in report.ranks if (value := read(rank)) is not None]
        numbers = [pick(known) if known else None for pick in spread.values()] + [read(rank) for rank in shown]
        columns[title] = ["" if number is None else write(number) for number in numbers]
        if title == "step":
            columns[BAR] = [Bar(partial(bar_text, seconds), LEAST_BAR, MOST_BAR) for seconds in drawn]
    return columns_lines(columns, width, left=("rank", BAR), less_needed=LESS_NEEDED, rest="--json has")


def whole_parts(shares: Sequence[float], whole: int) -> list[int]:
    """Scale the shares to integers that add up to `whole`, rounding by the largest remainders."""
    total = sum(shares)
    if total <= 0:
        return [0] * len(shares)
    exact = [share / total * whole for share in shares]
    parts = [int(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda at: (parts[at] - exact[at], at))
    for at in order[: whole - sum(parts)]:
        parts[at] += 1
    return parts


def bar_text(seconds: Mapping[str, float], width: int) -> Text:
    """Draw the time of a step as a bar of exactly `width` characters. Each kind of time has its own mark and color."""
    bar = Text()
    for kind, many in zip(OF_STEP, whole_parts([seconds.get(kind, 0.0) for kind in OF_STEP], width), strict=True):
        bar.append(MARKS[kind].mark * many, style_of(kind))
    bar.append(" " * (width - len(bar)))
    return bar


def _name(rank: RankReport, report: Report) -> Text:
    """Return the name of a rank. It includes the host and the device if these differ between ranks."""
    hosts, devices = {r.host for r in report.ranks}, {r.device for r in report.ranks}
    parts = [str(rank.rank), rank.host if len(hosts) > 1 else "", rank.device if len(devices) > 1 else ""]
    found = any(finding.rank == rank.rank for finding in report.findings)
    return Text(" ".join(filter(None, parts)), FOUND if found else "")


def outliers(report: Report) -> list[RankReport]:
    """Return the ranks that get a row of their own in the table when there are too many ranks to show."""
    named = [finding.rank for finding in report.findings if finding.rank is not None]
    by_rank = {rank.rank: rank for rank in report.ranks}
    for values in ([r.straggler_seconds for r in report.ranks], [r.peak_memory or 0.0 for r in report.ranks]):
        if max(values) > 1.5 * median(values):
            named.append(report.ranks[values.index(max(values))].rank)
    return [by_rank[rank] for rank in dict.fromkeys(named) if rank in by_rank][:MOST_OUTLIERS]
