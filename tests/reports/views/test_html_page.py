"""The page: every number on it is the JSON's, written as the rest of the project writes it, and it loads nothing."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwise.reports.analyse import report_of
from meshwise.reports.run_report import Report
from meshwise.reports.spans import KINDS, LANES, Counter, Timeline
from meshwise.reports.views import html_page
from meshwise.reports.views.html_page import render, report_dict
from meshwise.spec.units import bytes_text, count_text, percent_text, rate_text, seconds_text
from tests.reports.schedules import Schedule, delayed, even, jittered, played

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for found in map(shutil.which, BROWSERS) if found), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium (make browser)")
WRITTEN: dict[str, Callable[[Any], str]] = {
    r".*(_seconds|_seconds_p95|/seconds|/seconds/\w+)|step_seconds": seconds_text,
    r".*(/bytes|_memory|/memory_by_phase/.*)": bytes_text,
    r".*/share": percent_text,
    r".*/drift": lambda value: f"{value * 1e6:.2f} ppm",
    r".*/bus_bandwidth": lambda value: f"{bytes_text(value)}/s",
    r"(ranks/.*/|clocks/.*/)?(steps|samples|spans|dropped|last_steps|sync_points)|.*/count|.*_step": count_text,
    r"samples_per_second": rate_text,
    r".*/rank": str,
}
"""How the numbers at these paths are written; everything else is text."""
HOSTILE = "</script><b>\"job\" & 'co' ünï"


def hostile_timeline() -> Timeline:
    """Three ranks, one of them late, with losses, memory, and names that are markup."""
    timeline = played(Schedule(ranks=3, steps=40), delayed(jittered(even(), seed=1), rank=1, phase="backward", ms=20))
    time, step = np.arange(40) * 50_000_000, np.arange(1, 41)
    counters = tuple(
        Counter(rank, name, time, step, step % 4, np.linspace(1.5e9, 2.2e9, 40) if name == "resident" else 1 / step)
        for rank in range(3)
        for name in ("loss", "resident")
        if rank == 0 or name == "resident"
    )
    facts = {"job": HOSTILE, "status": "finished", "versions": {"torch": "2.13.0"}, "started": "2026-11-21T00:00:00"}
    names = ("", "all-reduce <i>")
    return dataclasses.replace(timeline, counters=counters, facts=facts, missing=(HOSTILE,), names=names)


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of(hostile_timeline(), "runs/<x>")


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return render(report, Timeline())


def carried(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    carried: dict[str, Any] = json.loads(found[1])
    return carried


def test_the_page_carries_the_report_whole(report: Report, page: str) -> None:
    assert carried(page) == json.loads(json.dumps(report_dict(report)))


def test_names_are_never_markup(page: str) -> None:
    plain = render(report_of(played(Schedule(steps=3), even())), Timeline())
    assert page.count("<b>") == plain.count("<b>")
    assert "&lt;/script&gt;&lt;b&gt;" in page.split("<style>")[0]


def test_nothing_is_loaded(page: str) -> None:
    tags = Tags()
    tags.feed(re.sub(r"<script.*?</script>", "<script></script>", page, flags=re.DOTALL))
    assert not [(tag, name) for tag, name in tags.seen if name in ("src", "href", "action", "data")]
    assert not re.search(r"@import|url\(", page.split("</style>")[0])


def test_the_script_has_the_kinds_and_lanes_of_the_recorder(page: str) -> None:
    found = re.search(r"const \{ KINDS, LANES, NOT_MEMORY \} = (\{.*?\});", page)
    assert found is not None
    assert json.loads(found[1]) == {"KINDS": [*KINDS], "LANES": [*LANES], "NOT_MEMORY": ["samples", "loss"]}


class Tags(html.parser.HTMLParser):
    """(tag, attribute) of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen += [(tag, name) for name, _ in attrs]


def test_the_page_of_a_small_run_has_at_most_a_megabyte_and_a_half(page: str) -> None:
    assert len(page.encode()) < 1_500_000


# ---- in a browser ----


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A page as Chromium drew it: elements that show a number, attributes of the root, bars, console, requests."""

    shown: list[tuple[str, str, str]]  # path, value, text
    root: dict[str, str | None]
    view: str
    bars: int
    found: int
    console: list[str]
    requests: list[str]


class Dom(html.parser.HTMLParser):
    """Reads what Chromium dumps."""

    def __init__(self) -> None:
        super().__init__()
        self.root: dict[str, str | None] = {}
        self.shown: list[list[str]] = []
        self.view = ""
        self._open: list[str] | None = None
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        if tag == "html":
            self.root = facts
        if facts.get("id") == "gantt":
            self.view = str(facts.get("data-view"))
        if "data-path" in facts:
            self._tag = tag
            self._open = [str(facts["data-path"]), str(facts["data-value"]), ""]
            self.shown.append(self._open)

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._open[2] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == self._tag:
            self._open = None


def drawn(page: str, folder: Path, view: str = "", *, shot: Path | None = None) -> Drawn:
    """Open the page in headless Chromium, with every network name unknown."""
    folder.mkdir(parents=True, exist_ok=True)
    file, net = folder / "page.html", folder / "net.json"
    file.write_text(page, encoding="utf-8")
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr", "--v=0", f"--log-net-log={net}", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--disable-background-networking", "--disable-component-update", "--no-first-run",
        "--virtual-time-budget=20000", "--window-size=1300,3200", "--hide-scrollbars",
        *(["--dump-dom"] if shot is None else [f"--screenshot={shot}"]),
        f"file://{file}{f'#view={view}' if view else ''}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    dom = Dom()
    dom.feed(done.stdout)
    return Drawn(
        [tuple(row) for row in dom.shown],  # type: ignore[misc]
        dom.root,
        dom.view,
        *bars_of(done.stdout),
        [line for line in done.stderr.splitlines() if "CONSOLE" in line],
        requests_of(net),
    )


def bars_of(dom: str) -> tuple[int, int]:
    """Bars of the Gantt: of spans, and of what was found (waiting, being blocked), which are drawn with a pattern."""
    gantt = dom[dom.index('id="gantt"') :]
    layer = gantt[gantt.index("barlayer") : gantt.index("</svg>")]
    points = re.findall(r'<g class="point"><path[^>]*>', layer)
    hatched = sum("url(" in point for point in points)
    return len(points) - hatched, hatched


def requests_of(net: Path) -> list[str]:
    """Addresses that the page asked for, but for itself; Chromium's own services do not count."""
    text = net.read_text(errors="replace") if net.exists() else ""
    addresses = set(re.findall(r'"url":"((?:https?|wss?)://[^"]*)"', text))
    return sorted(a for a in addresses if not re.match(r"https?://[^/]*(google|gstatic|gvt1)[^/]*/", a))


@pytest.fixture(scope="module")
def opened(processes: None, page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drawn]:
    yield drawn(page, tmp_path_factory.mktemp("page"))


def value_at(report: dict[str, Any], path: str) -> Any:
    value: Any = report
    for key in path.split("/"):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


@needs_browser
def test_every_number_on_the_page_is_that_of_the_json(opened: Drawn, report: Report) -> None:
    plain = report_dict(report)
    assert len(opened.shown) > 100
    for path, value, text in opened.shown:
        expected = value_at(plain, path)
        assert json.loads(value) == expected, path
        write = next((write for known, write in WRITTEN.items() if re.fullmatch(known, path)), None)
        assert write or isinstance(expected, str), path
        assert text == ("unknown" if expected is None else write(expected) if write else expected), path
        assert plain["text"].get(path, text) == text, path
    paths = {path for path, *_ in opened.shown}
    assert {"verdict", "missing/0", "step_seconds", "goodput/0/share", "ranks/2/seconds/waiting", "title"} <= paths
    assert {"ranks/2/rank", "ranks/2/steps", "ranks/2/last_steps", "views/0/first_step", "views/0/last_step"} <= paths


@needs_browser
def test_the_verdict_is_on_the_page_once(opened: Drawn, report: Report) -> None:
    assert report.verdict == report.findings[0].sentence
    assert [path for path, _, text in opened.shown if text == report.verdict] == ["verdict"]


@needs_browser
@pytest.mark.usefixtures("processes")
def test_memory_that_is_the_same_in_every_phase_is_a_sentence(tmp_path: Path) -> None:
    def numbers(name: str, values: Any) -> int:
        timeline = hostile_timeline()
        memory = tuple(dataclasses.replace(one, value=values) for one in timeline.counters if one.name == "resident")
        page = render(report_of(dataclasses.replace(timeline, counters=memory)), Timeline())
        return sum("memory_by_phase" in path for path, *_ in drawn(page, tmp_path / name).shown)

    assert numbers("same", np.full(40, 2e9)) == 3
    assert numbers("other", 1e9 * (1 + np.arange(1, 41) % 4)) == 3 * 4


@needs_browser
def test_the_page_draws_without_an_error_and_asks_nobody(opened: Drawn) -> None:
    assert opened.root.get("data-drawn") == "yes" and opened.root.get("data-errors") == "0"
    assert opened.console == [] and opened.requests == []


@needs_browser
@pytest.mark.usefixtures("processes")
def test_the_gantt_has_a_bar_for_each_span_in_view(opened: Drawn, report: Report, page: str, tmp_path: Path) -> None:
    pages = {opened.view: opened}
    for view in report.views[1:]:
        pages[view.name] = drawn(page, tmp_path / view.name, view.name)
    assert list(pages) == [view.name for view in report.views] == ["typical", "slowest", "first", "last"]
    timeline = hostile_timeline()
    for view in report.views:
        found = pages[view.name]
        blocked = [bar for bar in view.attributed if bar.kind in ("waiting", "communication")]
        assert found.view == view.name
        assert found.bars == len(timeline.of_steps(view.first_step, view.last_step)) > 0
        assert found.found == sum(bar.found for bar in view.bars) + len(blocked) > 0


@needs_browser
@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_page_that_asks_somebody_or_fails_would_be_seen(page: str, tmp_path: Path) -> None:
    """The two checks above can fail."""
    asking = page.replace('<main id="page">', '<img src="http://example.com/x.png"><main id="page">')
    assert any("example.com" in address for address in drawn(asking, tmp_path / "a").requests)
    failing = page.replace('"use strict";', '"use strict"; setTimeout(() => { throw new Error("planted"); });')
    found = drawn(failing, tmp_path / "b")
    assert any("planted" in line for line in found.console) and found.root.get("data-errors") != "0"


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 64])
@pytest.mark.usefixtures("processes")
def test_one_rank_and_sixty_four(ranks: int, tmp_path: Path) -> None:
    report = report_of(played(Schedule(ranks=ranks, steps=6), even()))
    found = drawn(render(report, Timeline()), tmp_path)
    assert found.root.get("data-drawn") == "yes" and found.root.get("data-errors") == "0" and found.console == []
    assert found.bars == sum(not bar.found for bar in report.views[0].bars)


@needs_browser
@pytest.mark.slow
def test_a_run_without_steps(tmp_path: Path) -> None:
    report = report_of(Timeline(facts={"job": "early", "status": "failed"}))
    page = render(report, Timeline())
    file = tmp_path / "page.html"
    file.write_text(page)
    dom = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", f"--user-data-dir={tmp_path / 'p'}", "--dump-dom", f"file://{file}"],
        capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    assert 'data-drawn="yes"' in dom and 'data-errors="0"' in dom


@needs_browser
@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_the_peak_memory_is_that_of_the_process(tmp_path: Path) -> None:
    """As in the text: what other programs hold of a device is in a table of its own, and is nobody's peak."""
    time, step = np.arange(40) * 50_000_000, np.arange(1, 41)
    sizes = {"allocated": 3e9, "device": 70e9, "reserved": 5e9}
    counters = tuple(
        Counter(rank, name, time, step, step % 4, np.full(40, size + rank))
        for rank in range(2)
        for name, size in sizes.items()
    )
    timeline = dataclasses.replace(played(Schedule(steps=40), even()), counters=counters)
    report = report_of(timeline)
    found = drawn(render(report, timeline), tmp_path)
    memory = [path for path, *_ in found.shown if "peak_memory" in path]
    assert memory == ["ranks/1/peak_memory", "ranks/0/peak_memory", "ranks/1/peak_memory"]
    assert [rank.peak_memory for rank in report.ranks] == [3e9, 3e9 + 1, None]  # rank 2 measured nothing
    for name in sizes:
        assert any(f"/memory_by_phase/{name}/" in path for path, *_ in found.shown)


NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_what_is_unknown_is_not_drawn_as_nothing() -> None:
    script = Path(html_page.__file__).with_suffix(".js").read_text()
    functions = script[script.index("function times") : script.index("function safe")]
    functions += script[script.index("function ceiling") : script.index("function series")]
    call = "console.log(JSON.stringify([times([1, null, 3], 2), ceiling([null, 2, 1]), ceiling([null])]))"
    done = subprocess.run([str(NODE), "-e", functions + call], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[2, None, 6], {"top": 1.3, "cut": True}, {"top": 0.001, "cut": False}]
