"""docs/tutorials.md keeps its word: every block works, fails, warns or prints as the line above it says.

A block whose library or device is absent is skipped by name. All blocks that need one process share one, and so do
those that need two: starting torch anew for each would take minutes.
"""

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("processes")

Outcome = dict[str, Any]  # one line of run_blocks.py: printed, warned, error

PAGE = Path(__file__).parents[2] / "docs" / "tutorials.md"
RUNNER = Path(__file__).with_name("run_blocks.py")
ALWAYS_THERE = {"Python", "torch", "meshwise", "2 workers"}
NOT_RUN_HERE = {"should work": "Works", "should fail": "Fails", "should warn": "Warns", "should be wrong": "Wrong"}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LABEL = re.compile(
    r"\*\*(?P<verdict>Works|Fails|Warns|Wrong|Not run here)\*\*(?:, (?P<hope>should \w+(?: wrong)?))?"
    r" · needs (?P<needs>[^·]+?)(?: · `+(?P<message>.+?)`+)?"
)


@dataclass(frozen=True)
class Block:
    """One runnable block of the page, with what the line above it promises."""

    name: str  # the line of the page it starts on, and its section
    language: str
    code: str
    verdict: str  # Works, Fails, Warns or Wrong
    shown_as_run: bool
    needs: frozenset[str]
    message: str  # part of the error or warning, "" where none is promised
    printed: str | None  # what the page shows as output

    @property
    def missing(self) -> list[str]:
        """What the block needs and this machine lacks."""
        return sorted(need for need in self.needs if not PRESENT[need]())

    @property
    def file_name(self) -> str | None:
        """The name in a first line like `# train.py`, under which a shell block finds it."""
        found = re.match(r"# (\w+\.py)\n", self.code)
        return found.group(1) if found else None


def peers() -> bool:
    return torch.cuda.device_count() >= 2 and torch.cuda.can_device_access_peer(0, 1)


PRESENT: dict[str, Callable[[], bool]] = {
    **dict.fromkeys(ALWAYS_THERE, lambda: True),
    "CuPy": lambda: importlib.util.find_spec("cupy") is not None,
    "1 GPU": lambda: torch.cuda.device_count() >= 1,
    "2 GPUs": lambda: torch.cuda.device_count() >= 2,
    "2 GPUs with peer access": peers,
}


def blocks_of(page: str) -> list[Block]:
    """Every python and bash block of the page. One without a readable line above it is an error, never left out."""
    found: list[Block] = []
    fences = list(FENCE.finditer(page))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence.group(1) == "text":
            continue
        before = page[: fence.start()].rstrip()
        line, section = page.count("\n", 0, fence.start()) + 1, re.findall(r"^#{2,3} (.+)$", before, re.MULTILINE)[-1]
        label = LABEL.fullmatch(before.splitlines()[-1])
        assert label, f"line {line}: the block has no line above it that says what it does and needs"
        output = None
        if following and following.group(1) == "text" and not page[fence.end() : following.start()].strip():
            output = following.group(2)
        found.append(
            Block(
                name=f"line {line}: {section.replace('`', '')}",
                language=fence.group(1),
                code=fence.group(2),
                verdict=NOT_RUN_HERE[label["hope"]] if label["hope"] else label["verdict"],
                shown_as_run=label["verdict"] != "Not run here",
                needs=frozenset(label["needs"].split(", ")),
                message=label["message"] or "",
                printed=output,
            )
        )
    return found


BLOCKS = blocks_of(PAGE.read_text(encoding="utf-8"))
PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [block for block in BLOCKS if block.language == "bash"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def clean_environment(**extra: str) -> dict[str, str]:
    """This environment without what a launcher would have put there."""
    kept = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    source = os.pathsep.join([str(PAGE.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": source, **extra}


def run_together(blocks: list[Block], workers: int, folder: Path) -> dict[str, list[Outcome]]:
    """Run the blocks on `workers` processes: each block's outcomes by rank, fewer if a worker did not get there."""
    wanted = [{"name": block.name, "code": block.code, "port": free_port()} for block in blocks]
    (folder / "blocks.json").write_text(json.dumps(wanted), encoding="utf-8")
    files = [folder / f"rank{rank}.jsonl" for rank in range(workers)]
    processes = []
    for rank, file in enumerate(files):
        launched = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(RUNNER), str(folder / "blocks.json"), str(file), *map(str, files)],
                env=clean_environment(**(launched if workers > 1 else {})),
                cwd=folder,
                stdin=subprocess.DEVNULL,
            )
        )
    try:
        for process in processes:
            process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        pass  # the blocks without an outcome fail below, by name
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outcomes: dict[str, list[Outcome]] = {block.name: [] for block in blocks}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            outcome = json.loads(line)
            outcomes[outcome["name"]].append(outcome)
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    runnable = [block for block in PYTHON if not block.missing]
    alone = [block for block in runnable if "2 workers" not in block.needs]
    in_pairs = [block for block in runnable if "2 workers" in block.needs]
    return run_together(alone, 1, tmp_path_factory.mktemp("alone")) | run_together(
        in_pairs, 2, tmp_path_factory.mktemp("in_pairs")
    )


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every named block of the page as a file."""
    folder = tmp_path_factory.mktemp("scripts")
    for block in PYTHON:
        if block.file_name:
            (folder / block.file_name).write_text(block.code, encoding="utf-8")
    return folder


def judge(block: Block, outcomes: list[Outcome]) -> None:
    """Fail unless every rank did what the page says."""
    for outcome in outcomes:
        if block.verdict == "Fails":
            kind, _, text = block.message.partition(": ")
            assert outcome["error"].startswith(f"{kind}: "), f"the page promises {kind}; it was: {outcome['error']}"
            assert text in outcome["error"]
            continue
        assert outcome["error"] == "", f"the page says that it runs; it raised {outcome['error']}"
        if block.verdict == "Warns":
            kind, _, text = block.message.partition(": ")
            assert any(w.startswith(f"{kind}: ") and text.strip() in w for w in outcome["warned"]), outcome["warned"]
        elif block.verdict == "Works":
            assert outcome["warned"] == [], "a form shown as correct must not warn"
    if block.printed is not None:
        printed = "".join(outcome["printed"] for outcome in outcomes)
        assert sorted(printed.splitlines()) == sorted(block.printed.splitlines())


@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in PYTHON])
def test_a_python_block_does_what_the_line_above_it_says(block: Block, request: pytest.FixtureRequest) -> None:
    if block.missing:
        pytest.skip(f"not run: needs {', '.join(block.missing)} ({block.name})")
    outcomes = request.getfixturevalue("outcomes")[block.name]
    assert len(outcomes) == (2 if "2 workers" in block.needs else 1), "a worker ended or hung before it was through"
    judge(block, outcomes)


@pytest.mark.parametrize("block", [pytest.param(b, id=b.name, marks=pytest.mark.slow) for b in SHELL])
def test_a_shell_block_does_what_the_line_above_it_says(block: Block, scripts: Path) -> None:
    assert not block.missing
    for line in block.code.splitlines():
        command, *arguments = shlex.split(line)
        assert command == "meshwise", "only our own command is run from the page"
        done = subprocess.run(
            [sys.executable, "-m", "meshwise", *arguments],
            env=clean_environment(),
            cwd=scripts,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    if block.printed is not None:
        assert [row for row in block.printed.splitlines() if row not in done.stdout.splitlines()] == []


def test_only_what_a_cpu_can_run_is_shown_as_run() -> None:
    assert [block.name for block in BLOCKS if block.shown_as_run != (block.needs <= ALWAYS_THERE)] == []


def test_a_block_that_fails_or_warns_says_how() -> None:
    assert [block.name for block in BLOCKS if (block.message != "") != (block.verdict in {"Fails", "Warns"})] == []


def test_every_python_block_compiles() -> None:
    """The blocks that are not run here too: at least they are Python."""
    for block in PYTHON:
        compile(block.code, block.name, "exec")


def test_a_block_without_a_promise_is_refused() -> None:
    with pytest.raises(AssertionError, match="line 3: the block has no line above it"):
        blocks_of("## Title\n\n```python\nprint(1)\n```\n")


@pytest.mark.parametrize(
    ("label", "outcome"),
    [
        ("**Works** · needs torch", {"error": "ValueError: no"}),
        ("**Works** · needs torch", {"warned": ["FutureWarning: soon"]}),
        ("**Works** · needs torch", {"printed": "2\n"}),
        ("**Fails** · needs torch · `ValueError: no`", {}),
        ("**Fails** · needs torch · `ValueError: no`", {"error": "ValueError: yes"}),
        ("**Fails** · needs torch · `ValueError: no`", {"error": "TypeError: no"}),
        ("**Warns** · needs torch · `FutureWarning: soon`", {}),
    ],
)
def test_a_broken_promise_is_noticed(label: str, outcome: Outcome) -> None:
    (block,) = blocks_of(f"## Title\n\n{label}\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n")
    with pytest.raises(AssertionError):
        judge(block, [{"printed": "1\n", "warned": [], "error": "", **outcome}])
