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
    "arrays": "Off the path: arrays",
}
STYLE = """
main { max-width: 1180px; }
.lead { color: var(--soft); max-width: 80ch; margin: -14px 0 26px; }
.row { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); gap: 14px 28px; margin: 0 0 22px; }
.row h2 { margin: 0 0 6px; } .row h2 small { color: var(--soft); font-weight: 400; float: right; }
.row p { margin: 0 0 12px; }
.row td { white-space: normal; text-align: left; vertical-align: top; } .row td:first-child { position: static; }
.row .pictures { align-self: start; } .pictures a { color: var(--accent); }
.pictures svg { max-width: 100%; height: auto; display: block; margin: 0 auto 10px; }
.pictures figure { margin: 0; } .pictures img { width: 100%; border-radius: 6px; display: block; }
.pictures figcaption { color: var(--soft); font-size: 13px; padding: 4px 0 8px; }
.row pre { font: 12.5px/1.45 ui-monospace, monospace; margin: 0; overflow-x: auto; }
.wide { grid-column: 1 / -1; } .row .typed { border-top: 1px solid var(--line); padding-top: 10px; color: var(--soft); }
.typed > pre { white-space: pre-wrap; overflow-wrap: anywhere; } details pre { max-height: 420px; }
#implement .pictures { grid-column: 1 / -1; }
#arrays .pictures { grid-column: 1 / -1; display: grid; grid-template-columns: 5fr 3fr 3fr; gap: 16px; }
summary { cursor: pointer; color: var(--accent); }
ins, del { text-decoration: none; }
ins { background: #d9f2e3; color: #14532d; } del { background: #fbe0dd; color: #7f1d1d; }
@media (prefers-color-scheme: dark) { .pictures svg { filter: invert(.9) hue-rotate(180deg); } }
@media (max-width: 900px) {
  .row { grid-template-columns: minmax(0, 1fr); } .pictures { overflow-x: auto; } .pictures svg { min-width: 500px; }
  #arrays .pictures { grid-template-columns: 1fr; }
}
"""
LEAD = """Handwritten digits, downloaded, cleaned, and learned by a small convolutional network on several devices with
meshwise: each station is a short file of PyTorch, run by the command below it. The width of a network is the number of
its first filters; a rank is the process of one device. Measured in this run, but for what station 3 predicts. More:
docs/journey.md"""
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
<p class="lead">{lead}</p>
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
    pictures = "".join(told["pictures"]).replace("<svg ", f'<svg role="img" aria-label="{TITLES[station]}" ')
    return f"""<section class="card row" id="{station}">
<div><h2>{name} <small>{seconds:.0f} s</small></h2><p>{html.escape(told["done"])}</p><table>{figures}</table></div>
<div class="pictures">{pictures}</div>
<div class="wide typed"><pre>{html.escape(chr(10).join(typed))}</pre>
<details><summary>what it printed</summary><pre>{html.escape(printed)}</pre></details></div>
</section>"""


def write_page(walked, seconds):
    """Write journey.html of the stations so far: {station: (commands, what they printed, seconds)}."""
    rows = "".join(row(number, station, *each) for number, (station, each) in enumerate(walked.items(), start=1))
    css = (files("meshwise.reports.views") / "html_page.css").read_text(encoding="utf-8") + STYLE
    last = "optimise" if "optimise" in walked else list(walked)[-1]
    verdict = json.loads((FOLDER / "rows" / f"{last}.json").read_text())["done"]
    about = f"{min(len(walked), 8)} of 8 stations, {seconds:.0f} s, {DEVICES}"
    footer = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {datetime.now():%Y-%m-%d %H:%M}"
    texts = {"verdict": html.escape(verdict), "lead": LEAD, "footer": footer, "about": about}
    (FOLDER / "journey.html").write_text(PAGE.format(style=css, rows=rows, **texts), encoding="utf-8")
