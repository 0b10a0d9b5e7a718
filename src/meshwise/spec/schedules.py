"""List the pipeline schedules by name, and why others are missing."""

from __future__ import annotations

from meshwise.spec.errors import PlanError, check_known

SCHEDULES = {
    "1f1b": "one forward and one backward in turn: a stage keeps activations of as many microbatches as stages follow",
    "gpipe": "all forwards, then all backwards: simple, and keeps the activations of every microbatch",
    "interleaved": "1f1b with two stages per rank: about half the idle time, and more messages",
}
ZERO_BUBBLE = ("zb", "dualpipe")
"""Beginnings of the names of zero-bubble schedules, besides `zero-bubble`. They split each backward in two."""


def check_schedule(name: str) -> None:
    """Raise PlanError for an unknown pipeline schedule."""
    word = name.lower().replace("-", "").replace("_", "").removeprefix("schedule")
    if "zerobubble" in word or word.startswith(ZERO_BUBBLE):
        raise PlanError(
            f"schedule={name!r}: zero-bubble schedules are not supported. They run each backward twice, so hooks on "
            "gradients run twice or not at all, and with torch 2.13 sharded blocks of the last stage get no gradient. "
            "Use schedule='interleaved', with a larger accumulate for less idle time."
        )
    check_known("schedule", name, SCHEDULES, PlanError)
