"""docs/from-ddp.md: DDP on two devices, ours on one and on two end with the same weights; its table quotes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwise.training.process.session import end_sessions
from tests.run_programs import assert_alike, columns, quoted, run

THEIRS, OURS, ROWS = columns("from-ddp.md", "| DDP | meshwise | what changes |")


def test_both_columns_train_the_same_model(pool: Any, tmp_path: Path) -> None:
    theirs, ours = THEIRS, OURS.replace("shuffle=True", "shuffle=False")
    for line, here in {
        "DistributedSampler(data)": "DistributedSampler(data, shuffle=False)",
        "dist.init_process_group()": "",  # the pool's is there
        "dist.destroy_process_group()": "dist.barrier()",  # behind what rank 0 writes
    }.items():
        assert theirs.count(line) == 1
        theirs = theirs.replace(line, here)
    want, _ = pool(2).run(run, theirs, tmp_path)
    end_sessions()
    for found in (run(ours, tmp_path), *pool(2).run(run, ours, tmp_path)):
        assert_alike(found, want)


def test_the_table_quotes_the_programs() -> None:
    assert len(ROWS) == 12 and quoted(ROWS, THEIRS, OURS)
