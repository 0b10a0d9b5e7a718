"""Operators are measured by calling them as they were called, once, and remembered for this processor.

Of planner/timing.py too.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planner.works import work

from meshwise.hardware.allowance import allowed_cores
from meshwise.hardware.words import machine_from_words
from meshwise.planner import measured, timing
from meshwise.planner.measured import OperatorTimes, prices_here
from meshwise.planner.memory import memory_curve, with_inside
from meshwise.planner.price import MEASURED, kernel_seconds
from meshwise.planner.prices import Prices, missing
from meshwise.planner.timing import bytes_of, call_of, made
from meshwise.planner.work import CollectiveOperation, Launch, Operation
from meshwise.spec.machine import Machine

aten = torch.ops.aten
DIES = "import os, torch; torch.ops.os = os; "
"""In the process that times: an operator `os.abort`."""


def result(call: str) -> torch.Tensor:
    found = made(call)()
    assert isinstance(found, torch.Tensor)
    return found


def test_a_call_is_made_again_with_tensors_of_the_same_layout() -> None:
    left, right = torch.rand(3, 5), torch.rand(7, 5).t()
    call = call_of(aten.mm.default, (left, right), {})
    assert result(call).shape == (3, 7)
    assert bytes_of(call) == 4 * (15 + 35)
    expanded = call_of(aten.sum.dim_IntList, (torch.rand(4, 1).expand(4, 6), [1], True), {"dtype": torch.float64})
    assert result(expanded).shape == (4, 1) and result(expanded).dtype == torch.float64
    assert bytes_of(expanded) == 16


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (
            aten.convolution.default,
            (torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        ),
        (aten.embedding.default, (torch.rand(100, 4), torch.randint(0, 100, (3, 5)))),
        (aten.embedding_dense_backward.default, (torch.rand(3, 5, 4), torch.randint(0, 100, (3, 5)), 100, -1, False)),
        (aten.nll_loss_forward.default, (torch.rand(6, 10), torch.randint(0, 10, (6,)), None, 1, -100)),
        (aten.gather.default, (torch.rand(6, 10), 1, torch.randint(0, 10, (6, 2)))),
        (aten.index.Tensor, (torch.rand(6, 10), [torch.randint(0, 6, (3,)), torch.randint(0, 10, (3,))])),
        (aten._foreach_add_.Scalar, ([torch.rand(3), torch.rand(4)], 1.0)),
        (aten.native_layer_norm.default, (torch.rand(6, 10), [10], torch.rand(10), torch.rand(10), 1e-5)),
        (aten.masked_fill.Scalar, (torch.rand(6, 10), torch.rand(6, 10) < 0.5, float("-inf"))),
    ],
)
def test_calls_of_many_kinds_are_made_again(func: object, args: tuple[object, ...]) -> None:
    call = call_of(func, args, {})
    assert call and json.loads(call)
    made(call)()


def test_what_cannot_be_written_has_no_call() -> None:
    assert call_of(aten.rand.generator, ([2],), {"generator": torch.Generator()}) == ""
    with pytest.raises(AttributeError):
        made(json.dumps(["mine.unknown.default", [], {}]))


def matmul(size: int) -> Operation:
    tensor = torch.empty(size, size, device="meta")
    call = call_of(aten.mm.default, (tensor, tensor), {})
    return Operation("aten.mm", ((size, size),) * 2, ("fp32",) * 2, 2 * size**3, 8 * size**2, 4 * size**2, call)


def test_operators_are_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = OperatorTimes(threads=1, folder=tmp_path)
    own = work(Launch(matmul(8)), Launch(matmul(8)), Launch(matmul(64)), kind="cpu", ranks=1)
    assert times(matmul(8)) is None and times.program is None
    assert times.measure([own]) == 0
    first = times(matmul(64))
    assert first is not None and first > 0 and times.program is not None
    monkeypatch.setattr(timing, "timed", lambda *call: pytest.fail("it is known"))
    again = OperatorTimes(threads=1, folder=tmp_path)
    assert again.measure([own]) == 0 and again(matmul(64)) == first and again(matmul(9)) is None
    other = OperatorTimes(threads=2, folder=tmp_path)
    assert other(matmul(64)) is None


def test_what_does_not_run_here_is_passed_over(tmp_path: Path) -> None:
    times = OperatorTimes(threads=1, folder=tmp_path)
    wrong = Operation("aten.mm", (), (), 0, 0, 0, json.dumps(["aten.mm.default", [1, 2], {}]))
    huge = matmul(1 << 22)
    assert times.measure([work(Launch(wrong), Launch(huge), Launch(matmul(4)))]) == 0
    assert times(wrong) is None and times(huge) is None and times(matmul(4)) is not None


def test_an_operator_on_memory_that_another_fills_has_no_call() -> None:
    """oneDNN's LSTM reads pointers in its workspace: with drawn numbers there the process ends."""
    part = torch.rand(3, 4)
    named = [one.name for one in aten.mkldnn_rnn_layer_backward.default._schema.arguments]
    assert call_of(aten.mkldnn_rnn_layer_backward.default, (), dict.fromkeys(named, part)) == ""
    empty = torch.empty(0)
    assert call_of(aten.mkldnn_rnn_layer_backward.default, (), {"workspace": empty}) == ""
    assert call_of(aten.batch_norm_backward.default, (), {"reserve": empty}) != ""


def test_an_operator_that_ends_its_process_is_named_and_the_others_are_timed(tmp_path: Path, processes: Any) -> None:
    ends = Operation("aten.mm", (), (), 0, 1 << 40, 0, json.dumps(["os.abort", [], {}]))
    own = work(Launch(ends), Launch(matmul(16)), kind="cpu", ranks=1)
    with patch.object(timing, "SERVE", DIES + timing.SERVE):
        timing._child.cache_clear()
        prices = prices_here(machine_from_words("1xcpu"), [own], folder=tmp_path)
    assert prices.notes == (
        "aten.mm crashed the process that measured its time (SIGABRT). Its time is estimated from its bytes.",
    )
    price = prices.of(matmul(16), 0)
    assert price is not None and price.origin == MEASURED


def test_a_budget_that_is_spent_leaves_some(tmp_path: Path) -> None:
    times = OperatorTimes(threads=1, folder=tmp_path)
    assert times.measure([work(Launch(matmul(4)), Launch(matmul(5)))], budget=0) == 2


def test_a_broken_cache_is_measured_again(tmp_path: Path) -> None:
    times = OperatorTimes(threads=1, folder=tmp_path)
    times.path.write_text("{")
    assert OperatorTimes(threads=1, folder=tmp_path)(matmul(4)) is None
    times.measure([work(Launch(matmul(4)))])
    assert OperatorTimes(threads=1, folder=tmp_path)(matmul(4)) is not None


def test_a_measured_operator_is_its_price(tmp_path: Path) -> None:
    times = OperatorTimes(threads=1, folder=tmp_path)
    times.measure([work(Launch(matmul(32)))])
    device = machine_from_words("1xcpu").devices[0]
    price = kernel_seconds(matmul(32), device, times)
    assert price is not None and (price.seconds, price.origin) == (times(matmul(32)), MEASURED)
    prices = Prices(machine_from_words("1xcpu"), {device.part: times}, times.program)
    assert prices.of(matmul(32), 0) == price and prices.host(matmul(32), 0).seconds == times.program


def test_a_machine_of_this_processor_is_measured_and_another_is_not(tmp_path: Path) -> None:
    unknown = Operation("aten.add", ((8, 8),), ("fp32",), 0, 800, 800)  # not called as it was: no call is noted
    own = work(Launch(matmul(16)), Launch(unknown), kind="cpu", ranks=1)
    machine = machine_from_words("1xcpu")
    prices = prices_here(machine, [own], folder=tmp_path)
    price = prices.of(matmul(16), 0)
    assert price is not None and price.origin == MEASURED and missing([own], prices) == ()
    assert machine.devices[0].memory_rate is None and prices.machine.devices[0].memory_rate is not None
    elsewhere = Machine("other", (replace(machine.devices[0], part="another processor"),))
    assert prices_here(elsewhere, [own], folder=tmp_path).of(matmul(16), 0) is None


def test_what_an_operator_allocates_inside_is_known(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A product of matrices that do not lie one row after the other copies them."""
    strided = torch.empty(4, 64, 128, device="meta")[:, :, ::2]
    copies, plain = (
        Operation(name, (), (), 0, 0, 0, call_of(func, (strided, strided), {}))
        for name, func in (("aten.bmm", aten.bmm.default), ("aten.add", aten.add.Tensor))
    )
    own = work(Launch(plain), Launch(copies), kind="cpu", ranks=1)
    times = OperatorTimes(threads=1, folder=tmp_path)
    times.measure([own])
    inner = times.inside(copies)
    most = max(itertools.accumulate(size if size > 0 else -inner[-size - 1] * (size < 0) for size in inner))
    assert not times.inside(plain) and most >= 64 * 64 * 4
    again = OperatorTimes(threads=1, folder=tmp_path)
    assert again.inside(copies) == times.inside(copies)
    assert memory_curve(with_inside(own, again.inside)).peak.bytes == most
    assert capfd.readouterr().err == ""  # torch's profiler prints lines


def test_workers_that_share_a_processor_are_measured_at_once(tmp_path: Path) -> None:
    alone, together = (OperatorTimes(threads=1, folder=tmp_path, workers=workers) for workers in (1, 2))
    own = work(Launch(matmul(256)), kind="cpu", ranks=1)
    assert together.measure([own]) == 0 and together(matmul(256)) is not None
    assert alone(matmul(256)) is None and alone.path != together.path


def test_workers_that_share_a_core_take_turns(tmp_path: Path) -> None:
    own = work(Launch(matmul(64)), kind="cpu", ranks=1)
    cores = len(allowed_cores())
    one, crowd = (
        prices_here(machine_from_words(f"{count}xcpu"), [own], folder=tmp_path) for count in (cores, 3 * cores)
    )
    single, shared = one.of(matmul(64), 0), crowd.of(matmul(64), 0)
    assert single is not None and shared is not None
    assert shared.seconds == pytest.approx(3 * single.seconds)
    assert crowd.host(matmul(64), 0).seconds == pytest.approx(3 * one.host(matmul(64), 0).seconds)


def test_an_optimizer_on_dtensors_takes_longer() -> None:
    """AdamW on a ViT in shards of two CPU workers spends 70 of 200 ms in DTensor's dispatch."""
    assert 1e-6 < measured.dtensor_seconds() < 1e-2
    machine = machine_from_words("2xcpu")
    prices = Prices(machine, program=1e-5, dtensor=1e-4)
    assert prices.host(CollectiveOperation("all-reduce", 1 << 20, (0, 1)), 0).seconds == 0  # what gloo's own threads do
    what = Operation("aten.mul_", ((4,),), ("fp32",), 4, 16, 16)
    host = {
        (phase, on): prices.host(what, 0, phase, on).seconds
        for phase in ("forward", "optimizer")
        for on in (False, True)
    }
    assert host == pytest.approx(
        {("forward", False): 1e-5, ("forward", True): 1e-5, ("optimizer", False): 1e-5, ("optimizer", True): 1.1e-4}
    )
