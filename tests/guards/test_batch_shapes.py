"""Batches that each rank pads to its own longest sample are said, once; equal and unknown ones are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import meshwise as mw
from meshwise.data.order import BatchSlice
from meshwise.engine.events import Events
from meshwise.engine.loops import LoopRead
from meshwise.guards.batch_shapes import BACKWARDS, BatchShapes, shapes_beside_samples
from meshwise.job.loop import run_job
from meshwise.job.options import RunOptions
from meshwise.process.session import default_engine, end_sessions

R = torch.rand
SAMPLES = {
    "rows and labels": ((R(5, 7), R(5)), ((7,),)),
    "a dict": ({"x": R(5, 7, 3), "y": R(5, 2)}, ((7, 3), (2,))),
    "time first": (R(9, 5, 3), ((9, 3),)),
    "as long as there are samples": (R(5, 5), ((5,),)),
    "nodes and edges of a graph": ({"x": R(31, 4), "edges": R(2, 90)}, None),
    "nodes of a graph, and as many samples as edges have rows": ({"x": R(31, 4), "edges": R(5, 90)}, None),
    "pictures of other sizes": ([R(5, 8 + n, 9) for n in range(5)], None),
    "labels alone": ([R(5), "text"], ()),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_the_shapes_beside_the_samples(case: str) -> None:
    batch, shapes = SAMPLES[case]
    assert shapes_beside_samples(batch, 5) == shapes


def of_ranks(*batches: Tensor) -> list[str]:
    """What two ranks with these batches say in two backwards."""
    shapes, said = BatchShapes(), []
    for _ in range(2):
        held = []
        for batch in batches:
            rows = len(batch)
            shapes.note(1, batch, BatchSlice(torch.arange(rows), rows, 2 * rows), "train.py:9")
            held.append(shapes.take())
        said.append(shapes.differ(held))
    return said


def test_other_lengths_are_said_once_and_others_samples_are_not() -> None:
    text, again = of_ranks(R(5, 12), R(4, 9))
    assert text.startswith("train.py:9: batches of one step have different shapes on different ranks (12 and 9, beside")
    assert "x, y = mw.split(x, y)" in text and again == ""
    assert of_ranks(R(5, 12), R(4, 12)) == of_ranks(R(5), R(4)) == ["", ""]


def test_a_long_run_looks_no_more() -> None:
    shapes, done = BatchShapes(), [0]
    events = Events(lambda: done[0])
    events.listen(shapes, backwards=BACKWARDS)
    for number in range(BACKWARDS + 1):
        for hear in events.of_loop(1).given:
            hear(LoopRead(1), (R(5, 12), BatchSlice(torch.arange(5), 5, 10)))
        assert bool(shapes.take()) is (number < BACKWARDS)
        done[0] += 1
        if done[0] >= events.due:
            events.tell()


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


ROWS = [torch.ones(2 + n % 4, 3) * n for n in range(12)]


def script() -> list[str]:
    model, loader = mw.distribute(nn.Linear(3, 1), DataLoader(ROWS, batch_size=6, collate_fn=padded), view="rank")
    for x in loader:
        mw.backward(model(x).square().mean())
    said = [text for text in default_engine().notes if "different shapes" in text]
    end_sessions()
    return said


def job() -> list[str]:
    made = mw.Job(
        model=lambda: nn.Linear(3, 1), loss=lambda model, x: model(x).square().mean(), data=lambda: ROWS,
        optimizer=lambda ps: torch.optim.SGD(ps, 0.01), batch_size=6, collate=padded, name="pads",
    )  # fmt: skip
    notes = run_job(made, RunOptions(plan=mw.Plan(data=2)), folder=None)["notes"]
    return [text for text in notes if "different shapes" in text]


def test_a_script_and_a_job_are_told_once(pool: Any) -> None:
    for said in pool(2).run(script):
        (text,) = said
        assert "test_batch_shapes.py:" in text and "collate_fn" in text
    for said in pool(2).run(job):
        (text,) = said
        assert text.startswith("job 'pads': batches of one step")
