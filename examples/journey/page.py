"""The page of a journey: a row a station, with what was done, its figures, its pictures, its commands."""

import html
import json
import os
import platform
from datetime import datetime
from importlib.resources import files

import torch
from station import DEVICES, FOLDER

TITLES = {
    "download": "Download",
    "clean": "Clean",
    "design": "Design",
    "implement": "Implement",
    "train": "Train",
    "watch": "Watch",
    "evaluate": "Evaluate",
    "optimise": "Optimise",
    "arrays": "Beside the way",
}
STYLE = """
main { max-width: 1180px; }
.row { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); gap: 14px 28px; margin: 0 0 22px; }
.row h2 { margin: 0 0 6px; } .row h2 small { color: var(--soft); font-weight: 400; float: right; }
.row p { margin: 0 0 12px; }
.row .pictures { background: #fff; color: #1d2126; border-radius: 8px; padding: 10px; align-self: start; }
.row .pictures pre { max-height: 520px; } .row .pictures a { color: #0072b2; }
.row svg, .row img { max-width: 100%; height: auto; display: block; margin: 0 auto 8px; }
.row td { white-space: normal; } .row td:first-child, .row th:first-child { position: static; }
.row pre { font: 12.5px/1.45 ui-monospace, monospace; margin: 0; overflow-x: auto; }
.row .wide { grid-column: 1 / -1; border-top: 1px solid var(--line); padding-top: 10px; }
.row .wide pre { color: var(--soft); } details pre { max-height: 420px; }
summary { cursor: pointer; color: var(--accent); }
ins { background: #d9f2e3; text-decoration: none; } del { background: #fbe0dd; }
@media (max-width: 760px) { .row { grid-template-columns: minmax(0, 1fr); } }
"""


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>The journey</title>
<style>{style}</style>
</head>
<body>
<main>
<header><h1>The journey: from a download to a smaller model</h1><span>{about}</span></header>
<p class="verdict">{verdict}</p>
{rows}
<footer>{footer}</footer>
</main>
</body>
</html>
"""


def row(number, station, typed, printed, seconds):
    """A station as HTML."""
    told = json.loads((FOLDER / "rows" / f"{station}.json").read_text())
    figures = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in told["figures"].items()
    )
    name = f"{number}. {TITLES[station]}" if number <= 8 else TITLES[station]
    return f"""<section class="card row" id="{station}">
<div><h2>{name} <small>{seconds:.0f} s</small></h2><p>{html.escape(told["done"])}</p><table>{figures}</table></div>
<div class="pictures">{"".join(told["pictures"])}</div>
<div class="wide"><pre>{html.escape(chr(10).join(typed))}</pre>
<details><summary>what it printed</summary><pre>{html.escape(printed)}</pre></details></div>
</section>"""


def write_page(walked, seconds):
    """Write journey.html of the stations so far: {station: (commands, what they printed, seconds)}."""
    rows = "".join(row(number, station, *each) for number, (station, each) in enumerate(walked.items(), start=1))
    css = (files("meshwise.timeline.views") / "html_page.css").read_text(encoding="utf-8") + STYLE
    last = json.loads((FOLDER / "rows" / f"{list(walked)[-1]}.json").read_text())["done"]
    verdict = json.loads((FOLDER / "rows/optimise.json").read_text())["done"] if "optimise" in walked else last
    about = f"{min(len(walked), 8)} of 8 stations, {seconds:.0f} s"
    footer = (
        f"{DEVICES}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
    )
    footer += f"{datetime.now():%Y-%m-%d %H:%M}. Every figure was measured in this run. More: docs/journey.md"
    page = PAGE.format(style=css, about=about, verdict=html.escape(verdict), rows=rows, footer=html.escape(footer))
    (FOLDER / "journey.html").write_text(page, encoding="utf-8")
