"""Whose options are whose: those behind a script's name are the script's, those before it are meshwise's."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwise import launcher
from meshwise.training.job.options import RunOptions

Typed = tuple[RunOptions, list[str] | None, str]
"""The options that a command has, the script's own arguments (None for a job), and what is said on stderr."""


Command = Callable[..., tuple[int, str, str]]
Types = Callable[[Sequence[str]], Typed]


@pytest.fixture
def typed(command: Command, monkeypatch: pytest.MonkeyPatch) -> Types:
    """What `meshwise run` makes of words, and what it says."""
    seen: list[tuple[RunOptions, list[str] | None]] = []

    def start_script(arguments: Sequence[str], options: RunOptions, *_: Any) -> int:
        seen.append((options, list(arguments)))
        return 0

    def start_job(options: RunOptions, *_: Any) -> tuple[None, int]:
        seen.append((options, None))
        return None, 0

    monkeypatch.setattr(launcher.script, "start_script", start_script)
    monkeypatch.setattr(launcher.run, "start_job", start_job)

    def call(words: Sequence[str]) -> Typed:
        code, _, said = command("run", *words)
        assert code == 0
        return *seen.pop(), said

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with train.py."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


TRAIN = RunOptions("train.py")


@pytest.mark.parametrize(
    ("words", "options", "own"),
    [
        ("train.py", TRAIN, ""),
        ("train.py --lr 0.1", TRAIN, "--lr 0.1"),
        ("train.py --epochs 3", TRAIN, "--epochs 3"),  # the script's: a job's epochs mean nothing to it
        ("train.py --out x", TRAIN, "--out x"),
        ("train.py --devices 2xcpu --lr 0.1", TRAIN, "--devices 2xcpu --lr 0.1"),
        ("train.py --help", TRAIN, "--help"),
        ("--devices 2xcpu train.py --devices 4", RunOptions("train.py", devices="2xcpu"), "--devices 4"),
        ("--devices=2xcpu --out=here train.py x", RunOptions("train.py", devices="2xcpu", out="here"), "x"),
        ("--exact-random train.py --blocks", RunOptions("train.py", exact_random=True), "--blocks"),
        ("--set shard=2 --set zero1=true train.py", RunOptions("train.py", settings=("shard=2", "zero1=true")), ""),
        ("train.py -- --devices 4", TRAIN, "--devices 4"),
        ("train.py a -- --devices 4", TRAIN, "a -- --devices 4"),
        ("train.py other.py", TRAIN, "other.py"),
        ("--out odd.py train.py a", RunOptions("train.py", out="odd.py"), "a"),  # a folder may be called so
        ("-- train.py --devices 4", TRAIN, "--devices 4"),
    ],
)
def test_what_follows_a_script_is_its_own(words: str, options: RunOptions, own: str, typed: Types) -> None:
    assert typed(words.split())[:2] == (options, own.split())


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("mlp --epochs 3", RunOptions("mlp", epochs=3)),
        ("--epochs 3 mlp", RunOptions("mlp", epochs=3)),
        ("--epochs 3 mlp --out odd.py", RunOptions("mlp", epochs=3, out="odd.py")),
        ("train.py:job --epochs 3", RunOptions("train.py:job", epochs=3)),
        ("--resume runs/a", RunOptions(resume="runs/a")),
    ],
)
def test_the_options_of_a_job_stand_on_both_sides_of_it(words: str, options: RunOptions, typed: Types) -> None:
    assert typed(words.split())[:2] == (options, None)


OPTIONS = ["--devices", "--out", "--master-addr"]
before = st.lists(
    st.tuples(st.sampled_from(OPTIONS), st.sampled_from(["2xcpu", "odd.py", "3"])), max_size=3, unique_by=lambda o: o[0]
)
behind = st.lists(st.sampled_from(["--lr", "3", "--", "x", "--devices", "y.py", "--out=z", "-h"]), max_size=5)


@given(before, behind)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_script_gets_all_its_words_in_their_order_and_none_of_ours(
    typed: Types, before: list[tuple[str, str]], behind: list[str]
) -> None:
    options, own, _ = typed([*(word for pair in before for word in pair), "train.py", *behind])
    assert own == (behind[1:] if behind[:1] == ["--"] else behind)
    assert options == RunOptions("train.py", **{name[2:].replace("-", "_"): value for name, value in before})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("train.py --devices 2xcpu --lr 1", "--devices: options after train.py .*write them before train.py"),
        ("--log wandb train.py --lr 1 --out=x --set a", "--out=x.* --set.*write train.py -- --out=x"),
        ("train.py --json 1", "--json: options after train.py"),
        ("train.py --epochs 3", ""),  # an option of jobs, which nobody could mean for meshwise here
        ("train.py -- --devices 2xcpu", ""),
        ("--devices 2xcpu train.py --lr 1", ""),
        ("mlp --devices 2xcpu", ""),
    ],
)
def test_an_option_of_meshwise_behind_a_script_that_has_none_such_is_refused(
    words: str, meant: str, typed: Types, command: Command, here: None
) -> None:
    if not meant:
        assert not typed(words.split())[2]
        return
    code, _, said = command("run", *words.split())
    assert code == 2 and re.search(meant, said)


OWN = {
    "argparse": 'parser.add_argument("--devices", default=2)',
    "click": "@click.option('-d', '--devices/--no-devices')",
    "transformers": "@dataclass\nclass Own:\n    devices: int = field(default=2)\n",
    "typer": "def main(lr: float = 0.1, devices: int = 2): ...",
    "fire": "def main(lr=0.1, devices=2): ...",
    "absl": "flags.DEFINE_integer('devices', 2, '')",
    "imported": "import os\nfrom lib import own_options\n",
}
OTHERS = {
    "docstring": '"""Run it with meshwise run --devices 2xcpu train.py."""',
    "longer": 'parser.add_argument("--devices-per-host")',
    "variable": "devices = 2\nif devices: pass\n",
    "its own function": "def add_lr(parser): ...\nadd_lr(parser)\n",
    "installed": "import torch.distributed.run\n",
}
MAYBE = {"lightning": "Trainer.add_argparse_args(parser)", "words": "options = read(sys.argv[1:])"}


@pytest.mark.parametrize("kind", [*OWN, *OTHERS, *MAYBE])
def test_an_option_that_the_script_may_have_itself_is_not_refused(kind: str, typed: Types, here: None) -> None:
    Path("lib").mkdir()
    Path("lib/own_options.py").write_text("parser.add_argument('--devices')")
    Path("lib/__init__.py").touch()
    Path("train.py").write_text((OWN | OTHERS | MAYBE)[kind])
    if kind in OTHERS:
        with pytest.raises(AssertionError):
            typed(["train.py", "--devices", "2"])
    else:
        assert ("Note: --devices" in typed(["train.py", "--devices", "2"])[2]) == (kind in MAYBE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--resume {run} train.py --lr 1", "loads its saved state itself (mw.load).*Leave --resume out"),
        ("--epochs 3 train.py", "this option works only for jobs"),
        ("absent.py", "no such file"),
        ("--resume {run}", "is a script, and a script loads its state by itself"),
        ("--resume absent", "not a run folder"),
    ],
)
def test_what_cannot_start_is_refused_before_it_is_said_to_start(
    words: str, said: str, command: Command, here: None
) -> None:
    Path("run").mkdir()
    Path("run/run.json").write_text('{"job": "train.py"}')
    code, _, shown = command("run", *words.format(run="run").split())
    assert code == 2 and "starting" not in shown
    assert all(part in " ".join(shown.split()) for part in said.split(".*"))
