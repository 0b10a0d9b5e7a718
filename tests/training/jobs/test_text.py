"""The text of the gpt job: documents, and their split."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwise.spec.errors import DataError
from meshwise.training.jobs.gpt import IGNORED, SHORTEST, cut, make_documents, read_files


def test_documents_are_whole_paragraphs_where_they_fit() -> None:
    text = b"\n\n".join([b"a" * 30, b"b" * 30, b"c" * 100])
    pieces = list(cut(text, 70))
    assert pieces[0] == b"a" * 30 + b"\n\n" + b"b" * 30 + b"\n\n"
    assert [set(piece) - {10} for piece in pieces[1:]] == [{ord("c")}, {ord("c")}]
    assert all(SHORTEST <= len(piece) <= 70 for piece in pieces)


def test_the_standard_library_splits_by_file_and_the_same_way_each_time() -> None:
    train, held_out = read_files()
    again = read_files()
    assert (train, held_out) == again
    assert len(train) > 5 * len(held_out) > 0
    assert not set(train) & set(held_out) - {b""}


def test_a_batch_pads_with_targets_that_do_not_count() -> None:
    documents = make_documents([b"x" * 40, b"yz" * 30], longest=60, most=10)
    order = documents.lengths.argsort()
    inputs, targets = documents.batch(order)
    assert inputs.shape == targets.shape == (2, int(documents.lengths.max()))
    assert (inputs[:, 0] == 256).all() and torch.equal(inputs[1, 1:], targets[1, :-1])
    assert (targets[0] != IGNORED).sum() == documents.lengths[order[0]]


def test_a_folder_without_text_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing must have at least two text files"):
        read_files(tmp_path / "missing")
    with pytest.raises(DataError, match="at least two text files, one of them for the test set, but it has 0"):
        read_files(tmp_path)
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(name * 20)
    train, held_out = read_files(tmp_path)
    assert len(train) + len(held_out) == 2 and held_out


def test_a_folder_is_split_whatever_its_files_are_called(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for number in range(2):
        for name in ("a", "b", "tests/c"):
            (tmp_path / f"{name}{number}.txt").write_text(name * 20)
    train, held_out = read_files(tmp_path)
    assert sorted(train + held_out) == sorted(path.read_bytes() for path in tmp_path.rglob("*.txt"))
    assert train and held_out


def test_hidden_files_are_not_text(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in (".git/config", ".hidden", "one.txt"):
        (tmp_path / name).write_text(name * 20)
    with pytest.raises(DataError, match="at least two text files, one of them for the test set, but it has 1"):
        read_files(tmp_path)
