"""What a dump of torch's flight recorder tells of a rank's collectives."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from meshwise.torch_compat.flight_recorder import GroupProgress, progress, read_progress
from tests.pool import Pool


def dump(enqueued: int, started: int, completed: int, **more: Any) -> bytes:
    """From documentation, not recorded: the form of version 2.5 in "Flight Recorder for Debugging Stuck Jobs"
    (pytorch.org/tutorials), of NCCL with two groups; in JSON, where numbers of a group's status are strings."""
    status = {
        "last_enqueued_collective": str(enqueued),
        "last_started_collective": str(started),
        "last_completed_collective": str(completed),
    }
    entries = [
        {
            "frames": [{"name": "train", "filename": "train.py", "line": 31}],
            "record_id": number,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": "nccl:all_reduce" if number % 2 else "nccl:_all_gather_base",
            "input_sizes": [[3, 4]],
            "state": "completed" if number <= completed else "started" if number <= started else "scheduled",
            "is_p2p": False,
        }
        for number in range(max(1, enqueued - 3), enqueued + 1)
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return json.dumps(
        {"version": "2.5", "pg_config": config, "pg_status": {"0": status}, "entries": entries, **more}
    ).encode()


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((9, 9, 9), "all 9 collectives of group default_pg are completed"),
        ((9, 7, 6), "all_reduce 7 of group default_pg has begun and is not completed"),
        ((9, 7, 7), "_all_gather_base 8 of group default_pg has not begun on the device"),
        ((9, -1, 7), "_all_gather_base 8 of group default_pg is enqueued and not completed"),  # without timing
        ((99, -1, 7), "collective 8 of group default_pg is enqueued and not completed"),  # fallen out of the buffer
    ],
)
def test_how_far_a_rank_has_come_is_one_sentence(numbers: tuple[int, int, int], told: str) -> None:
    (found,) = read_progress(dump(*numbers))
    assert str(found) == told


@pytest.mark.parametrize(
    "odd", [b"", b"[]", b'"text"', b'{"pg_status": {"0": {}}}', b'{"pg_status": [1]}', b"{}", b"\xff"]
)
def test_what_is_of_another_form_tells_nothing(odd: bytes) -> None:
    assert read_progress(odd) == []
    assert read_progress(dump(1, 1, 0, entries=7)) == []


def test_a_status_that_is_behind_its_entries_is_not_believed() -> None:
    told = json.loads(dump(9, -1, 7))
    for entry, over in zip(told["entries"], (True, True, True, False), strict=True):
        entry["retired"] = over
    (found,) = read_progress(json.dumps(told).encode())
    assert (found.completed, found.name) == (8, "all_reduce")
    told["entries"][-1] |= {"retired": True, "is_p2p": True}
    assert read_progress(json.dumps(told).encode())[0].completed == 8


def of_gloo() -> list[GroupProgress]:
    import torch
    import torch.distributed as dist

    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo", group_desc="of this test")
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=group)
    until = time.monotonic() + 30
    while True:  # gloo's own thread notes that one is over
        found = [each for each in progress() if each.group == "of this test"]
        if found[0].completed == 3 or time.monotonic() > until:
            return found


def test_the_dump_of_this_torch_is_read(pool: Any) -> None:
    workers: Pool = pool(2)
    for (found,) in workers.run(of_gloo):
        assert (found.enqueued, found.begun, found.completed) == (3, None, 3)
