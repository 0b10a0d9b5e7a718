"""Arguments of a job's function as texts: read after annotations and defaults, or refused with what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from meshwise.spec.arguments import argument_texts, read_arguments
from meshwise.spec.errors import UsageError


def job(
    lr: float = 1e-3,
    depth: int = 2,
    wide: bool = False,
    name: str = "a",
    clip: float | None = None,
    old: Optional[int] = None,  # noqa: UP045
    kind: Literal["adam", "sgd", 3] = "adam",
    folder: Path = Path("data"),
    sizes: tuple[int, ...] = (),
) -> None: ...


def plain(lr=1, rate=0.5, flag=True, anything=None, *, needed) -> None:  # type: ignore[no-untyped-def]
    ...


@pytest.mark.parametrize(
    ("function", "text", "value"),
    [
        (job, "lr=3e-4", 3e-4),
        (job, "lr=1", 1.0),
        (job, "depth=12", 12),
        (job, "wide=true", True),
        (job, "wide=No", False),
        (job, "name=3", "3"),
        (job, "name=a=b", "a=b"),
        (job, "name=", ""),
        (job, "clip=none", None),
        (job, "clip=0.5", 0.5),
        (job, "old=None", None),
        (job, "old=7", 7),
        (job, "kind=sgd", "sgd"),
        (job, "kind=3", 3),
        (job, "folder=a/b", Path("a/b")),
        (plain, "lr=3", 3),
        (plain, "lr=0.3", 0.3),
        (plain, "rate=1", 1.0),
        (plain, "flag=no", False),
        (plain, "anything=1e-3", 1e-3),
        (plain, "anything=none", None),
        (plain, "needed=big", "big"),
        (plain, "needed=true", True),
    ],
)
def test_a_text_is_read_as_the_signature_says(function: Any, text: str, value: object) -> None:
    (found,) = read_arguments(function, [text], "train.py:job").values()
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lrr=1", "--arg lrr=1: train.py:job has no parameter 'lrr'. Did you mean 'lr'? train.py:job takes lr, depth,"),
        ("lr=fast", "--arg lr=fast: 'lr' of train.py:job must be float."),
        ("depth=2.5", "'depth' of train.py:job must be int."),
        ("wide=2", "must be bool."),
        ("clip=x", "must be float or None."),
        ("kind=adagrad", "must be adam or sgd or 3."),
        (
            "sizes=1,2",
            "'sizes' of train.py:job must be tuple. --arg can pass only an int, float, bool, str, path or None.",
        ),
    ],
)
def test_what_the_function_does_not_take_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_arguments(job, [text], "train.py:job")
    assert says in str(caught.value)


def test_a_function_of_any_names_takes_any() -> None:
    assert read_arguments(lambda **given: None, ["lr=0.1", "name=x"], "j") == {"lr": 0.1, "name": "x"}
    with pytest.raises(UsageError, match=r"has no parameter 'lr'\. j takes none"):
        read_arguments(lambda: None, ["lr=0.1"], "j")


def test_values_are_written_as_they_are_read_again() -> None:
    given = {"lr": 0.1 + 0.2, "depth": 3, "wide": True, "name": "a b", "clip": None, "folder": Path("x")}
    assert read_arguments(job, argument_texts(given), "j") == given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["lr"], "--arg lr is not of the form NAME=VALUE"),
        (["=3"], "is not of the form NAME=VALUE"),
        (["learning-rate=3"], "is not of the form NAME=VALUE"),
        (["lr=1", "lr=2"], "--arg lr= is given 2 times"),
        ({"sizes": [1, 2]}, "args: sizes must be a number, text, path or None, not list"),
    ],
)
def test_what_is_no_argument_is_refused(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        argument_texts(given)
