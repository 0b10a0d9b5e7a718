"""What is kept of a rehearsed plan: the kinds of its step add up, and its prices say where they are from."""

import pytest

from meshwise.hardware.machines import find_machine
from meshwise.planner.estimator import rehearser
from meshwise.planner.prediction import prediction
from meshwise.spec.plan import Plan
from meshwise.spec.prediction import prediction_in, prediction_to_toml
from meshwise.training.jobs.registry import find_job


def test_the_kinds_are_those_of_a_report_and_add_up():
    whole = rehearser(find_job("mnist-cnn"), find_machine("2xA100"))(Plan(data=2))
    found = prediction(whole, "mnist-cnn")
    assert found.seconds == whole.estimate.seconds.value and found.machine == "2xA100"
    assert sum(found.kinds.values()) == pytest.approx(found.seconds, rel=1e-3)
    assert {"forward", "backward", "optimizer"} <= found.kinds.keys()
    assert found.origin.startswith("catalog") and found.origin.endswith("%")
    assert found.memory["allocated"] <= found.memory["reserved"] <= found.memory["device"]
    assert prediction_in(prediction_to_toml(found)) == found


def test_without_a_time_there_is_memory():
    found = prediction(rehearser(find_job("mnist-mlp"), find_machine("2xcpu"))(Plan(data=2)), "mnist-mlp")
    assert found.seconds is None and not found.kinds and found.memory["allocated"] > 0
