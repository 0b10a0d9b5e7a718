"""A rank answers what its device waits for, in the thread that hears its launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshwise.torch_compat.flight_recorder import GroupProgress
from meshwise.workers.hang import ASKED
from meshwise.workers.worker import tell_collectives


def test_the_answer_is_a_line_for_the_user_and_nothing_where_nothing_is_known() -> None:
    sent: list[tuple[str, Any]] = []
    channel: Any = SimpleNamespace(listeners={}, send=lambda kind, **facts: sent.append((kind, facts)))
    tell_collectives(channel, 1, list)
    channel.listeners[ASKED]({})
    assert sent == []
    tell_collectives(channel, 1, lambda: [GroupProgress("default_pg", 9, 7, 7, "all_reduce")])
    channel.listeners[ASKED]({})
    text = "rank 1, by torch's flight recorder: all_reduce 8 of group default_pg has not begun on the device."
    assert sent == [("note", {"text": text})]
