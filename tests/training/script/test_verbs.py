"""Small verbs, on one device without a launcher and on two."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwise as mw


def test_every_verb_is_harmless_on_one_device_before_anything_was_distributed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert mw.is_main()
    with mw.main_first():
        mw.barrier()
    mw.print("a", "b", sep="-")
    mw.empty_cache()
    assert capsys.readouterr().out == "a-b\n"


def test_memory_is_that_of_this_process_and_prints_as_a_line() -> None:
    memory = mw.memory()
    assert memory.device == "cpu" and memory.reserved is None
    assert 10 << 20 < memory.allocated <= memory.peak * 1.1
    assert str(mw.Memory("cuda:0", 3 << 30, 4 << 30, 7 << 29)) == (
        "cuda:0: 3.0 GiB allocated, 4.0 GiB reserved, peak 3.5 GiB"
    )
    assert str(mw.Memory("cpu", 512, None, 2048)) == "cpu: 512 B allocated, peak 2.0 KiB"
    assert mw.memory(torch.device("cpu")).device == "cpu"


def test_rank_0_is_first_and_alone_prints(pool: Any, tmp_path: Path) -> None:
    def case(folder: Path) -> Any:
        import contextlib
        import io

        with mw.main_first():
            found = (folder / "made").exists()
            if mw.is_main():
                time.sleep(0.2)
                (folder / "made").touch()
        mw.barrier()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            mw.print("hello")
        return mw.is_main(), found, out.getvalue()

    assert pool(2).run(case, tmp_path) == [(True, False, "hello\n"), (False, True, "")]
