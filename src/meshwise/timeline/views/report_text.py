"""A run's report on one screen of a terminal: the verdict first, then what it rests on.

What does not fit on the screen is left out from the least important on; in a file or a pipe nothing is. No number is
ever cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from meshwise.spec.units import count_text, seconds_text
from meshwise.terminal.kind_marks import fitting, legend
from meshwise.terminal.table import GLUE, wrap
from meshwise.timeline.run_report import GoodputPart, Report
from meshwise.timeline.views.gantt_text import gantt_text, step_nearest
from meshwise.timeline.views.live_progress import rate_text
from meshwise.timeline.views.rank_table import OF_STEP, outliers, percent, rank_table

STATUS_STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow", "failed": "bold red"}
MOST_MISSING = 3
LEAST_NEEDED = (("clocks", False), ("missing", True), ("marks", False), ("advice", False))
"""What is left out, or told in short (True), in this order, where the screen is too low."""
APART = ("table", "gantt", "goodput")
FEWEST_GANTT_ROWS = 2
MOST_GANTT_RANKS = 16
MOST_GANTT_STEPS = 4


def report_text(report: Report, width: int | None = None, height: int | None = None) -> RenderableType:
    """The report, at most `width` characters wide (None: as wide as the console) and, where `height` is given or it is
    printed on a terminal, if possible no higher than that leaves room for a prompt."""
    return _ReportText(report, width, height)


@dataclass(frozen=True)
class _ReportText:
    """Drawn when it is printed: only the console knows how large it is, and whether it can show blocks."""

    report: Report
    width: int | None
    height: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        height = self.height or (console.size.height - 1 if console.is_terminal else None)
        lines = report_lines(self.report, width, height, ascii_only=options.ascii_only, console=console)
        yield from lines


def report_lines(report: Report, width: int, height: int | None, *, ascii_only: bool, console: Console) -> list[Text]:
    """The lines of the report, each at most `width` characters; at most `height` of them where that can be."""

    def wrapped(*texts: Text) -> list[Text]:
        return [line for text in texts for line in wrap(text, width, console)]

    table = rank_table(report, width, ascii_only)
    kinds = [kind for kind in OF_STEP if report.kinds.get(kind, 0.0) > 0]
    parts = {
        "head": wrapped(_title(report, width), Text(report.verdict, "bold")),
        "table": table,
        "gantt": [],
        "marks": legend(kinds, width, ascii_only) if table else [],
        "goodput": wrapped(*_goodput(report)),
        "missing": wrapped(*_missing(report)),
        "advice": wrapped(*_advice(report)),
        "clocks": wrapped(_clocks(report)) if len(report.clocks) > 1 else [],
    }
    for less, shorter in LEAST_NEEDED:
        if height is not None and sum(map(len, parts.values())) > height:
            parts[less] = wrapped(*_missing(report, 1)) if shorter else []
    room = None if height is None else height - sum(map(len, parts.values()))
    parts["gantt"] = _gantt(report, width, room, ascii_only)
    lines = _spaced(parts, None if room is None else room - len(parts["gantt"]))
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
        line.plain = fitting(line.plain, ascii_only)
    return lines


def _spaced(parts: Mapping[str, list[Text]], room: int | None) -> list[Text]:
    """The parts below each other, with an empty line before each of APART as long as there is room for one."""
    lines: list[Text] = []
    for name, part in parts.items():
        apart = name in APART or (name == "marks" and not parts["gantt"] and not parts["table"])
        if part and lines and apart and (room is None or room > 0):
            lines.append(Text())
            room = None if room is None else room - 1
        lines += part
    return lines


def _title(report: Report, width: int) -> Text:
    """What run, and how far it came: `mnist-mlp finished · 938 steps of 2.7 ms · 13.3 s · 16,422 samples/s`."""
    facts = []
    if report.steps:
        facts.append(
            f"{count_text(report.steps)} step{'s' if report.steps > 1 else ''} of {seconds_text(report.step_seconds)}"
        )
    if report.samples_per_second is not None:
        facts.append(f"{rate_text(report.samples_per_second)} samples/s")
    facts.append(f"{seconds_text(report.wall_seconds)} {'so far' if report.status == 'running' else 'in all'}")
    source = "" if report.source == "measured" else f"{report.source} "
    rest = "".join(f" · {fact}" for fact in facts)
    room = width - len(f" {source}{report.status}{rest}")
    title = report.title if len(report.title) <= room else "…" + report.title[len(report.title) - max(room - 1, 8) :]
    text = Text(title, "bold").append(" ").append(source)
    return text.append(report.status, STATUS_STYLES.get(report.status, "")).append(rest, "not bold")


def _goodput(report: Report) -> list[Text]:
    """Where the wall time went, in whole percents, and what the waiting was for."""
    waits = sorted((part for part in report.waiting if part.share >= 0.005), key=lambda part: -part.seconds)
    of_waiting = ", ".join(f"{part.name} {percent(part.share)}".replace(" ", GLUE) for part in waits)
    facts = [
        f"{share} % {name}" + (f" ({of_waiting})" if name == "waiting" and of_waiting else "")
        for name, share in _percents(report.goodput)
    ]
    return [Text("goodput  " + " · ".join(facts))] if facts else []


def _percents(parts: Sequence[GoodputPart]) -> list[tuple[str, int]]:
    """The first part, then the others from the largest on, in percent; those of 0 are left out."""
    shares = {part.name: round(100 * part.share) for part in parts}
    first, *others = [*shares] or [""]
    names = [first, *sorted(others, key=lambda name: -shares[name])]
    return [(name, shares[name]) for name in names if shares.get(name)]


def _missing(report: Report, most: int = MOST_MISSING) -> list[Text]:
    more = len(report.missing) - most
    lines = [Text(f"missing  {sentence}", "yellow") for sentence in report.missing[:most]]
    return [*lines, Text(f"missing  and {more} more", "yellow")] if more > 0 else lines


def _advice(report: Report) -> list[Text]:
    return [Text("try      ", "green").append(f.advice, "default") for f in report.findings[:1] if f.advice]


def _clocks(report: Report) -> Text:
    return Text(f"clocks   times of different ranks agree to ±{seconds_text(report.error_seconds)}", "dim")


def _gantt(report: Report, width: int, room: int | None, ascii_only: bool) -> list[Text]:
    """One step of usual length, or the few that were chosen, of as many ranks as there is room for; those that stand
    out come first."""
    running = report.status == "running"  # then the newest steps say more than any
    view = next((view for view in report.views if view.name == "last" and running), next(iter(report.views), None))
    if view is None or not view.bars:
        return []
    whole = view.name == "chosen" and view.last_step - view.first_step < MOST_GANTT_STEPS
    step = None if whole else step_nearest(view, report.step_seconds)
    title = f"step {step}, one of {'the newest' if view.name == 'last' else 'usual length'}"
    if whole:
        one = view.first_step == view.last_step
        title = f"step {view.first_step}" if one else f"steps {view.first_step} to {view.last_step}"
    ranks = [rank.rank for rank in report.ranks]
    named = [*dict.fromkeys([*(rank.rank for rank in outliers(report)), *ranks])]
    for many, beside in [(len(ranks), True), *((n, False) for n in range(len(ranks), 0, -1))]:
        # Rows that say less come after the empty lines that order the rest.
        least = many + (3 + len(APART) if beside else 2)
        if many > MOST_GANTT_RANKS or many < min(FEWEST_GANTT_ROWS, len(ranks)) or (room is not None and least > room):
            continue
        some = f", {many} of {len(ranks)} ranks" if many < len(ranks) else ""
        lines = gantt_text(
            view, sorted(named[:many]), width, step=step, ascii_only=ascii_only, beside=beside, with_legend=False
        )
        if lines and (room is None or len(lines) + least - many - 1 <= room):
            return [Text(f"{title}{some}", "dim"), *lines]
    return []
