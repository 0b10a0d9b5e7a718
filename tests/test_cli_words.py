"""Whose options are whose: those of an own-loop script are not taken for the launcher's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.cli import LAUNCH_OPTIONS, script_arguments_apart


@pytest.mark.parametrize(
    ("words", "apart"),
    [
        ("run train.py", "run train.py --"),
        ("run train.py --lr 0.1", "run train.py -- --lr 0.1"),
        ("run train.py --epochs 3", "run train.py -- --epochs 3"),  # the script's: a job's epochs mean nothing to it
        ("run train.py --devices 2xcpu --lr 0.1", "run train.py --devices 2xcpu -- --lr 0.1"),
        ("run train.py --devices=2xcpu --out=runs x", "run train.py --devices=2xcpu --out=runs -- x"),
        ("run --devices 2xcpu train.py --devices 4", "run --devices 2xcpu train.py --devices 4 --"),
        ("run train.py --lr 0.1 --devices 4", "run train.py -- --lr 0.1 --devices 4"),
        ("run train.py --blocks --devices 2xcpu x", "run train.py --blocks --devices 2xcpu -- x"),
        ("run train.py --lr 1 --blocks", "run train.py -- --lr 1 --blocks"),
        ("run train.py -- --devices 4", "run train.py -- --devices 4"),
        ("run train.py --devices 2xcpu -- --devices 4", "run train.py --devices 2xcpu -- --devices 4"),
        ("run train.py other.py", "run train.py -- other.py"),
        ("run --out odd.py train.py a", "run --out odd.py train.py -- a"),  # a folder may be called so
        ("run train.py --devices", "run train.py --devices --"),
    ],
)
def test_a_scripts_arguments_go_behind_two_dashes(words: str, apart: str) -> None:
    assert script_arguments_apart(words.split()) == apart.split()


@pytest.mark.parametrize("words", ["", "run", "run mlp --epochs 3", "run train.py:job --epochs 3", "--help"])
def test_a_jobs_words_stay_as_they_are(words: str) -> None:
    assert script_arguments_apart(words.split()) == words.split()


value = st.sampled_from(["2xcpu", "runs", "odd.py", "3"])
option = st.one_of(
    st.builds(lambda name, word: [name, word], st.sampled_from(LAUNCH_OPTIONS), value),
    st.builds(lambda name, word: [f"{name}={word}"], st.sampled_from(LAUNCH_OPTIONS), st.sampled_from(["2xcpu", "3"])),
)
options = st.lists(option, max_size=3).map(lambda pairs: [word for pair in pairs for word in pair])
rest = st.lists(st.sampled_from(["--lr", "3", "--", "x", "--devices", "y.py", "--out=z"]), max_size=5).filter(
    lambda words: not words or words[0].split("=")[0] not in LAUNCH_OPTIONS
)


@given(options, options, rest)
def test_a_script_gets_all_its_words_in_their_order_and_none_of_ours(
    before: list[str], behind: list[str], words: list[str]
) -> None:
    ours = ["run", *before, "train.py", *behind]
    apart = script_arguments_apart([*ours, *words])
    assert apart == [*ours, *([] if words[:1] == ["--"] else ["--"]), *words]
    assert script_arguments_apart(apart) == apart
