"""A message names the user's own line, past our frames and those of libraries."""

from __future__ import annotations

import functools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from meshwise.spec.user_code import is_users, place, user_frame, user_place
from meshwise.torch_compat.tree import map_tensors


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("/home/me/train.py", True),
        ("/tmp/ipykernel_12/345.py", True),
        ("<stdin>", True),
        ("<ipython-input-3>", True),
        ("<string>", False),
        ("<frozen runpy>", False),
        (torch.__file__, False),
        (json.__file__, False),
        (sys.modules[map_tensors.__module__].__file__, False),
        ("/opt/other/lib/python3.11/site-packages/timm/models.py", False),
    ],
)
def test_code_is_the_users_unless_it_is_ours_or_a_librarys(file: str, users: bool) -> None:
    assert is_users(file) is users


def test_the_line_is_the_users_even_where_ours_calls_a_library() -> None:
    found: list[str] = []
    map_tensors(functools.partial(lambda add, tensor: add(tensor), lambda tensor: note(found, tensor)), torch.ones(1))
    assert found == [f"{place(__file__, note.__code__.co_firstlineno + 1)}"]


def note(found: list[str], tensor: torch.Tensor) -> torch.Tensor:
    found.append(user_place())
    return tensor


def test_a_thread_that_runs_a_library_alone_has_no_frame_of_the_users() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(user_frame).result() is None
    frame = user_frame()
    assert frame is not None and frame.f_code.co_filename == __file__


def test_a_place_is_told_from_the_folder_where_the_program_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert place(str(tmp_path / "sub" / "train.py"), 31) == "sub/train.py:31"
    assert place("/elsewhere/train.py", 31) == "/elsewhere/train.py:31"
    assert place("<stdin>", 2) == "<stdin>:2"
