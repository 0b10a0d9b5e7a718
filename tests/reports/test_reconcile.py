"""Predicted beside measured: by kind of time and by memory, and a sentence on what differs most."""

import dataclasses
import json

import numpy as np
import pytest

from meshwise.reports.analyse import report_of
from meshwise.reports.spans import Counter
from meshwise.reports.views.html_page import report_dict
from meshwise.reports.views.report_text import report_text
from meshwise.spec.json_values import json_value
from meshwise.spec.prediction import Prediction
from tests.reports.schedules import Schedule, even, played
from tests.reports.views.reports import printed

PREDICTED = Prediction(
    "mine", 8, "2xH100", "catalog 100 %", 0.02, 0.018, 0.03, {"forward": 0.004, "backward": 0.01}, {"allocated": 100}
)


def report(predicted, *counters):
    timeline = played(Schedule(ranks=2, steps=10), even())
    return report_of(dataclasses.replace(timeline, facts={"predicted": predicted}, counters=counters))


def test_a_run_stands_beside_its_prediction():
    found = report(json_value(PREDICTED))
    beside = found.predicted
    assert beside.measured == pytest.approx(found.step_seconds, rel=0.01) and beside.seconds == 0.02
    kinds = {kind.name: (kind.predicted, kind.measured) for kind in beside.kinds}
    assert kinds["forward"][0] == 0.004 and kinds["forward"][1] > 0
    most = max(beside.kinds, key=lambda kind: abs(kind.measured - kind.predicted)).name
    assert f"What differs most is {most}" in beside.sentence
    assert "predicted on 2xH100" in beside.sentence and "prices: catalog 100 %" in beside.sentence
    assert [(row.name, row.predicted, row.measured) for row in beside.memory] == [("allocated", 100.0, None)]
    assert "A step takes" in printed(report_text(found)) and "of a step" in printed(report_text(found))
    told = report_dict(found)
    assert told["text"]["predicted/seconds"] == "20 ms" and json.dumps(told)


def test_memory_is_held_against_the_counter_of_its_name():
    at = np.zeros(1, np.int64)
    counter = Counter(1, "allocated", at + 10**9, at + 1, at - 1, np.array([150.0]))
    beside = report(json_value(PREDICTED), counter).predicted
    assert beside.memory[0].measured == 150.0
    assert "Memory: allocated 150 B of 100 B predicted." in beside.sentence


def test_a_prediction_of_another_run_is_said_not_shown():
    found = report("The prediction of the plan file is not shown: it belongs to gpt.")
    assert (
        found.predicted is None and "The prediction of the plan file is not shown: it belongs to gpt." in found.missing
    )


def test_a_damaged_one_is_missing():
    found = report({"job": "mine"})
    assert found.predicted is None and any("cannot be read" in sentence for sentence in found.missing)


def test_a_run_without_one_has_none():
    assert report(None).predicted is None
