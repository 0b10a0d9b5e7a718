"""The pages keep their word: README's loop runs and counts its lines, no page says "not yet" of what there is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import typer

import meshwise as mw
from meshwise.checker.causes import CauseKind
from meshwise.cli import COMMANDS
from meshwise.spec.addresses import addresses

ROOT = Path(__file__).parents[2]
README, CHINESE, TUTORIALS = (ROOT / name for name in ("README.md", "README.zh.md", "docs/tutorials.md"))
LINKING = [ROOT / "llms.txt", *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
OF_TODAY = [page for page in LINKING if page.name not in {"CHANGELOG.md", "log.md"}]


def loop(page: Path) -> list[str]:
    """The lines of a page's training loop, each with its mark."""
    text = page.read_text(encoding="utf-8")
    return text.split("<!-- LOOP -->\n```diff\n")[1].split("\n```\n<!-- end -->")[0].splitlines()


def program(lines: list[str], without: str) -> str:
    return "".join(line[1:] + "\n" for line in lines if not line.startswith(without))


def printed(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return "".join(line for line in done.stdout.splitlines(keepends=True) if line.startswith("epoch"))


def test_the_readme_counts_its_lines() -> None:
    lines = loop(README)
    new, old = (sum(line.startswith(mark) for line in lines) for mark in "+-")
    whole = len([line for line in program(lines, "+").splitlines() if line])
    assert f"{new - old} lines added, {old} changed, of {whole}." in README.read_text()


def test_the_chinese_page_has_the_same_loop() -> None:
    assert loop(CHINESE) == loop(README)


def test_the_loop_prints_the_same_on_one_device_and_on_two(processes: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program(loop(README), "-"))
    one = printed(tmp_path, "train.py")
    assert len(one.splitlines()) == 5
    shutil.rmtree(tmp_path / "state")
    assert printed(tmp_path, "-m", "meshwise", "run", "--devices", "2xcpu", "train.py") == one
    assert (tmp_path / "best.pt").exists() and (tmp_path / "state").exists()
    assert printed(tmp_path, "train.py") == ""  # it goes on from the state, where nothing is left to do


@pytest.mark.slow
def test_the_loop_before_runs_without_meshwise(processes: None, tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text(program(loop(README), "+"))
    assert "meshwise" not in program(loop(README), "+")
    assert len(printed(tmp_path, "before.py").splitlines()) == 5


def not_yet(text: str) -> list[str]:
    """The clauses of a page that say that something is not there."""
    said = re.compile(r"\bnot yet\b|\bnot there yet\b")
    return [clause.strip() for clause in re.split(r"[.;|\n]", text) if said.search(clause)]


def existing(clause: str) -> set[str]:
    """Public names and fields of the plan that a clause names."""
    return set(re.findall(r"\w+", clause)) & ({*dir(mw)} | {field.name for field in fields(mw.Plan)})


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name)
def test_no_page_says_not_yet_of_what_there_is(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert {clause: names for clause in not_yet(text) if (names := existing(clause))} == {}


def test_what_the_tutorials_page_calls_not_there_is_this_and_no_more() -> None:
    """Who builds one of these takes its row back."""
    rows = [clause.partition(":")[0] for clause in not_yet(TUTORIALS.read_text(encoding="utf-8"))]
    assert [row for row in rows if row != '"Not yet" is meant plainly'] == [
        "Going on without the device",
    ]


def test_a_name_that_is_there_is_found_in_a_clause() -> None:
    clauses = not_yet("| a | `mw.copy`: **not yet** |\nMemory. No `shard` is not there yet; fine")
    assert [existing(clause) for clause in clauses] == [{"copy"}, {"shard"}]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may say behind its #."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Links of the page to files or headings that are not there."""
    found = []
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            found.append(f"{path}#{anchor}")
    return found


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken_links(page) == []


def test_each_address_that_a_refusal_names_is_there(tmp_path: Path) -> None:
    named = {address for address in addresses().values() if address}
    assert len(named) > 50
    page = tmp_path / "page.md"
    page.write_text("".join(f"[more]({ROOT / 'docs' / address})" for address in named))
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](page.md#one-two) [b](#three) [c](none.md) [d](https://example.org/#x)\n")
    assert broken_links(page) == ["#three", "none.md#"]


def test_each_page_stands_once_in_the_navigation_of_the_site() -> None:
    pages = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    of_the_root = ["CHANGELOG.md", "CONTRIBUTING.md", "index.md"]  # docs/make_site.py
    assert sorted(pages) == sorted(
        [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")] + of_the_root
    )


def test_each_cause_has_its_row_at_the_address_that_check_prints() -> None:
    rows = re.findall(r'^\| <a id="([\w-]+)"></a>(.+?) \|', (ROOT / "docs/check.md").read_text(), re.MULTILINE)
    assert [(f"check.md#{anchor}", title) for anchor, title in rows] == [(c.address, c.title) for c in CauseKind]


@pytest.mark.slow
def test_the_site_is_built(processes: None, tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "source/examples/13_ema.py.txt").read_text() == (ROOT / "examples/13_ema.py").read_text()


def options_of(command: str) -> set[str]:
    params = typer.main.get_command(import_module(COMMANDS[command]).app).params
    return {option for each in params for option in (*each.opts, *each.secondary_opts)}


def unknown(text: str) -> list[str]:
    """Commands, options and public names in a text's code that there are not."""
    code = "\n".join(map("".join, re.findall(r"^```\w*\n(.*?)^```|`([^`\n]+)`", text, re.DOTALL | re.MULTILINE)))
    found = [f"mw.{name}" for name in re.findall(r"\bmw\.(\w+)", code) if not (name.isupper() or hasattr(mw, name))]
    for command, rest in re.findall(r"^meshwise ([a-z]+)(.*)", code, re.MULTILINE):
        words = re.split(r"   |\.py ", rest)[0]  # what follows explains, or is the script's own
        known = options_of(command) if command in COMMANDS else set()
        found += [] if command in COMMANDS else [command]
        found += [f"{command} {option}" for option in re.findall(r" (--[a-z-]+)", words) if option not in known]
    return found


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.name)
def test_commands_and_names_on_a_page_exist(page: Path) -> None:
    assert unknown(page.read_text(encoding="utf-8")) == []


def test_an_unknown_command_is_found() -> None:
    text = "`mw.sums(x)`\n```\nmeshwise train x.py\nmeshwise check --fast train.py --lr 1\n```\nmeshwise makes\n"
    assert unknown(text) == ["mw.sums", "train", "check --fast"]


def misplaced(text: str) -> list[str]:
    """Options of a command that stand after the name of a script, whose own they would be."""
    found = []
    for command, option in re.findall(
        r"meshwise (check|plan|run|submit) (?:\S+ )*?[\w/]+\.py (?:[^-\s]\S* )*--([a-z-]+)", text
    ):
        found += [f"meshwise {command}: --{option}"] if f"--{option}" in options_of(command) else []
    return found


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: page.name)
def test_options_of_meshwise_stand_before_a_script(page: Path) -> None:
    assert misplaced(page.read_text(encoding="utf-8")) == []


def test_an_option_behind_a_script_is_found() -> None:
    assert misplaced("meshwise plan train.py --machine 8xH100\nmeshwise run train.py --lr 0.1") == [
        "meshwise plan: --machine"
    ]
