"""List and verify the saved states of a run: `meshwise checkpoints`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from meshwise.records import checkpoints as files
from meshwise.records.folder import newest_run
from meshwise.records.run_list import find_run
from meshwise.spec.errors import CheckpointError
from meshwise.spec.units import bytes_text, plural
from meshwise.terminal.completion import runs_here
from meshwise.terminal.screen import Drawn, Screen
from meshwise.terminal.table import table_lines

RUNS = Path("runs")
RUN = typer.Argument(metavar="RUN", help="a run: its name, a part of it or its folder", autocompletion=runs_here)
app = typer.Typer(add_completion=False)


@app.command()
def checkpoints(
    run: Annotated[str | None, RUN] = None,
    verify: Annotated[bool, typer.Option("--verify", help="read every byte, and compare it with its hash")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the states as JSON")] = False,
) -> None:
    """List the saved states of a run. Without a name, the newest run is listed. Exit code 1: a state is damaged.

    \b
    meshwise checkpoints                     list the states of the newest run
    meshwise checkpoints mnist-cnn --verify  check whether each state is whole
    meshwise checkpoints state               saved by mw.checkpoint("state")
    meshwise checkpoints runs/20261121-140502-gpt --json  print JSON
    meshwise run --resume RUN/checkpoint/step-00000040.1  train on from a state
    """
    folder = run_folder(run)
    saved = files.checkpoints_in(folder / files.CHECKPOINTS) or files.checkpoints_in(folder)
    found = [_entry(each, verify) for each in saved]
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(Drawn(lambda screen: _lines(found, folder, screen)), soft_wrap=True)
    if any(entry["wrong"] for entry in found):
        raise typer.Exit(1)


def run_folder(word: str | None) -> Path:
    """Find the folder of a run.

    word: the folder, the run's name in runs/, or a part of the name. It may also be a folder to which a training loop
        saved checkpoints itself. None is the newest run.
    """
    if word is not None and files.checkpoints_in(Path(word)):
        return Path(word)
    return newest_run(RUNS) if word is None else find_run(RUNS, word)


def _entry(saved: files.Checkpoint, verify: bool) -> dict[str, Any]:
    """Describe a checkpoint. `verified` says whether its bytes were read, `wrong` which damage was found."""
    try:
        facts, wrong = files.read_manifest(saved).facts, ""
    except CheckpointError as error:
        facts, wrong = {}, str(error).rstrip(".")
    return {
        "name": saved.path.name,
        "step": saved.step,
        "epoch": facts.get("epoch", 0) + (facts.get("index", 1) > 0),  # counts an epoch that has begun but not ended
        "attempt": saved.attempt,
        "devices": facts.get("world", 0),
        "plan": str(facts.get("plan", "")).removeprefix("Plan(").removesuffix(")"),
        "saved": facts.get("time", 0.0),
        "size": files.size_of(saved.path),
        "verified": verify,
        "wrong": wrong or (files.verified(saved) if verify else ""),
    }


def _lines(entries: Sequence[dict[str, Any]], folder: Path, screen: Screen) -> list[Text]:
    if not entries:
        text = (
            f"No state was saved in {folder}. A job saves at its end, and with --save-every. A loop of your own saves "
        )
        return screen.wrap(Text(f"{text}in the folder that it passes to mw.checkpoint: meshwise checkpoints FOLDER."))
    titles = ["checkpoint", "step", "epoch", "devices", "plan", "saved", "size", "state"]
    table = table_lines(titles, [_row(entry) for entry in entries], screen.table_width, left=(0, 4, 7))
    wrong = [line for e in entries if e["wrong"] for line in screen.wrap(Text(f"{e['name']}: {e['wrong']}"))]
    total = f"{plural(len(entries), 'checkpoint')}, {bytes_text(sum(entry['size'] for entry in entries))}"
    return [*table, *([Text(), *wrong] if wrong else []), Text(), Text(f"{total} in {folder}", "dim")]


def _row(entry: dict[str, Any]) -> list[str | Text]:
    state = Text("whole", "green") if entry["verified"] else Text("not verified")
    saved = f"{datetime.fromtimestamp(entry['saved']):%Y-%m-%d %H:%M:%S}"
    facts = [*(str(entry[name]) for name in ("name", "step", "epoch", "devices", "plan")), saved]
    if entry["wrong"] and not entry["devices"]:  # the manifest could not be read
        facts[2:] = [""] * 4
    return [*facts, bytes_text(entry["size"]), Text("damaged", "red") if entry["wrong"] else state]
