"""Sizes in words, and what fits in memory before anything is allocated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.hardware.measure.result import SHARE_OF_MEMORY, fitting, read_sizes
from meshwise.spec.errors import UsageError


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("1K:64K", (1024, 4096, 16384, 65536)),
        ("1k:4K:2", (1024, 2048, 4096)),
        ("64M", (64 << 20,)),
        ("1K:5K", (1024, 4096, 5120)),  # the last one is measured, whatever the steps
        ("1KiB : 4 KB", (1024, 4096)),
        ("7", (7,)),
    ],
)
def test_words(words: str, sizes: tuple[int, ...]) -> None:
    assert read_sizes(words) == sizes


@pytest.mark.parametrize("words", ["", "x", "1K:", "4K:1K", "1K:4K:1", "1K:4K:x", "1:2:3:4", "-1K", "1.5K", "9999T"])
def test_what_is_no_size_says_what_to_write(words: str) -> None:
    with pytest.raises(UsageError, match="Write --sizes"):
        read_sizes(words)


@given(st.text())
def test_any_text_is_sizes_or_a_usage_error(words: str) -> None:
    try:
        sizes = read_sizes(words)
    except UsageError:
        return
    assert list(sizes) == sorted(set(sizes)) and sizes[0] >= 1


def test_an_asked_size_that_does_not_fit_is_refused_and_a_default_one_left_out() -> None:
    sizes, free = read_sizes("1K:1G"), 1 << 30
    kept = fitting(sizes, free, 4, asked=False)
    assert kept == sizes[: len(kept)] and kept[-1] * 4 <= free * SHARE_OF_MEMORY < kept[-1] * 4 * 4
    with pytest.raises(
        UsageError,
        match=r"measure 1\.0 GiB, 4 buffers with 4\.0 GiB in all are needed, but only 1\.0 GiB are free.*1K:128M",
    ):
        fitting(sizes, free, 4, asked=True)


def test_what_is_proposed_instead_is_accepted() -> None:
    for words in ("1T", "1K:1T", "512G:1T"):
        with pytest.raises(UsageError) as refused:
            fitting(read_sizes(words), 20 << 30, 4, asked=True)
        proposed = str(refused.value).rpartition("--sizes ")[2].rstrip(".")
        assert fitting(read_sizes(proposed), 20 << 30, 4, asked=True)
