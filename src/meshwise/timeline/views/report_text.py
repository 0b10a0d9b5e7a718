"""Show a run's report on one screen, the verdict first.

The evidence for the verdict follows.

If the report does not fit on the screen, its least important parts are left out; in a file or a pipe, none are. No
number is ever cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from meshwise.spec.units import bytes_text, percent_text, plural, rate_text, seconds_text
from meshwise.terminal.kind_marks import legend
from meshwise.terminal.screen import GLUE, Drawn, Screen, spaced
from meshwise.terminal.table import Cell, table_lines
from meshwise.timeline.run_report import GoodputPart, Report
from meshwise.timeline.views.gantt_text import gantt_text
from meshwise.timeline.views.rank_table import OF_STEP, outliers, rank_table

STATUS_STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow", "failed": "bold red"}
WHOLE_TITLE = 30  # characters of a title that are never cut: the line wraps
MOST_MISSING = 3
LEAST_NEEDED = (
    ("clocks", False),
    ("missing", True),
    ("stages", False),
    ("marks", False),
    ("advice", False),
    ("predicted", False),
    ("attempts", False),
    ("about", False),
)
"""Parts of the report to leave out (False) or shorten (True) if the screen has too few lines, in this order."""
EMPTY_LINES = 3
FEWEST_GANTT_ROWS = 2
MOST_GANTT_RANKS = 16
MOST_GANTT_STEPS = 4


def report_text(report: Report, width: int | None = None, height: int | None = None) -> RenderableType:
    """Draw the report, if possible in at most `height` lines.

    width: the largest number of characters in a line. The default is the width of the console.
    height: the default is the height of the terminal, less room for a prompt.
    """
    return Drawn(lambda screen: report_lines(report, screen, height or screen.height), width)


def report_lines(report: Report, screen: Screen, height: int | None) -> list[Text]:
    """Return the report as lines. There are at most `height` lines, if possible."""
    width, ascii_only = screen.width, screen.ascii_only
    table = rank_table(report, width, ascii_only)
    kinds = [kind for kind in OF_STEP if report.kinds.get(kind, 0.0) > 0]
    parts = {
        "head": screen.wrap(_title(report, width), *_verdict(report)),
        "about": screen.wrap(*(Text(f"{name:8} {text}", "dim") for name, text in report.about.items())),
        "table": table,
        "stages": _stages(report, width),
        "predicted": _predicted(report, screen),
        "gantt": [],
        "marks": legend(kinds, width, ascii_only) if table else [],
        "attempts": _attempts(report, width),
        "goodput": screen.wrap(*_goodput(report)),
        "missing": screen.wrap(*_missing(report)),
        "advice": screen.wrap(*_advice(report)),
        "clocks": screen.wrap(_clocks(report)) if len(report.clocks) > 1 else [],
    }
    most = math.inf if height is None else height
    for less, shorter in LEAST_NEEDED:
        if sum(map(len, parts.values())) > most:
            parts[less] = screen.wrap(*_missing(report, 1)) if shorter else []
    parts["gantt"] = _gantt(report, width, most - sum(map(len, parts.values())), ascii_only)
    marks = parts["gantt"] + parts["marks"]
    first = [parts["table"], parts["stages"], marks] if parts["gantt"] else [parts["table"] + marks, parts["stages"]]
    first += [parts["predicted"], parts["attempts"]]
    last = [line for name in ("goodput", "missing", "advice", "clocks", "about") for line in parts[name]]
    return spaced([parts["head"], *first, last], height)


def _verdict(report: Report) -> list[Text]:
    """Return the headline and the verdict of the report as two lines. If there is no headline, return only the verdict.
    If the verdict begins with the words of the headline, return the verdict as one line, with these words in bold."""
    begins = report.headline.rstrip(".")
    if not begins:
        return [Text(report.verdict, "bold")]
    if report.verdict.startswith(begins):  # said once
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
    """Return the line that says which share of the wall time was useful, and which share was spent on waiting and other
    causes. Returns [] if nothing is known."""
    waits = sorted((part for part in report.waiting if part.share >= 0.005), key=lambda part: -part.seconds)
    of_waiting = ", ".join(f"{part.name} {percent_text(part.share)}".replace(" ", GLUE) for part in waits)
    facts = [
        f"{share} % {name}" + (f" ({of_waiting})" if name == "waiting" and of_waiting else "")
        for name, share in _percents(report.goodput)
    ]
    return [Text("goodput  " + " · ".join(facts))] if facts else []


def _percents(parts: Sequence[GoodputPart]) -> list[tuple[str, int]]:
    """Return the name of each part and its share in whole percent. The first of `parts` stays first, and the others are
    sorted from large to small. Parts of 0 % are left out."""
    rest = sorted(parts[1:], key=lambda part: -round(100 * part.share))
    return [(part.name, share) for part in [*parts[:1], *rest] if (share := round(100 * part.share))]


def _missing(report: Report, most: int = MOST_MISSING) -> list[Text]:
    more = len(report.missing) - most
    lines = [Text(f"missing  {sentence}", "yellow") for sentence in report.missing[:most]]
    return [*lines, Text(f"missing  and {more} more", "yellow")] if more > 0 else lines


def _advice(report: Report) -> list[Text]:
    return [Text("try      ", "green").append(f.advice, "default") for f in report.findings[:1] if f.advice]


def _stages(report: Report, width: int) -> list[Text]:
    """Return a table of the pipeline's stages, or [] if there is no pipeline."""
    if report.pipeline is None:
        return []
    rows: list[list[Cell]] = []
    for stage in report.pipeline.stages:
        times = (stage.forward_seconds, stage.backward_seconds, stage.forward_seconds + stage.backward_seconds)
        rows.append([str(stage.stage), ",".join(map(str, stage.ranks)), *map(seconds_text, times)])
    return table_lines(["stage", "ranks", "forward", "backward", "a microbatch"], rows, width, left=(0, 1))


def _attempts(report: Report, width: int) -> list[Text]:
    """Return a table of the attempts of the run, or [] if there was only one."""
    if len(report.attempts) < 2:
        return []
    rows: list[list[Cell]] = []
    for one in report.attempts:
        before = f"{seconds_text(one.before)} in the queue" if one.queued else seconds_text(one.before)
        place = one.launched or (plural(one.devices, "device") if one.devices else "")
        place += f", {plural(one.devices, 'device')}" if one.launched and one.devices else ""
        facts = [str(one.number), one.began, before if one.before else "", place, seconds_text(one.seconds)]
        steps = ["–" if count is None else str(count) for count in (one.from_step, one.steps_lost)]
        rows.append([*facts, *steps, one.ended])
    titles = ["attempt", "began", "after", "on", "lived", "from step", "done again", "ended"]
    return table_lines(titles, rows, width, left=(1, 3, 7))


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


def _clocks(report: Report) -> Text:
    return Text(f"clocks   times of different ranks agree to ±{seconds_text(report.error_seconds)}", "dim")


def _gantt(report: Report, width: int, room: float, ascii_only: bool) -> list[Text]:
    """Draw a step of usual length, or the few steps that the user chose. As many ranks are drawn as there is room for,
    outliers first."""
    running = report.status == "running"  # then the newest steps tell most
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
    named = [*dict.fromkeys([*(rank.rank for rank in outliers(report)), *ranks])]
    for many, overlapped in [(len(ranks), True), *((n, False) for n in range(len(ranks), 0, -1))]:
        # Rows that matter less come after the empty lines that order the rest.
        least = many + (3 + EMPTY_LINES if overlapped else 2)
        if many > MOST_GANTT_RANKS or many < min(FEWEST_GANTT_ROWS, len(ranks)) or least > room:
            continue
        some = f", {many} of {len(ranks)} ranks" if many < len(ranks) else ""
        shown = sorted(named[:many])
        lines = gantt_text(window, shown, width, step=step, ascii_only=ascii_only, overlapped=overlapped)
        if lines and len(lines) + least - many - 1 <= room:
            return [Text(f"{title}{some}", "dim"), *lines]
    return []
