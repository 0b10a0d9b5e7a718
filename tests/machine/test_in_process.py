"""All copies of one process, on virtual devices: every path is measured, checked, and goes through the one function."""

from __future__ import annotations

from meshwise.machine.measure.in_process import measure_in_process
from meshwise.machine.measure.progress import Progress
from meshwise.machine.measure.result import PathResult
from meshwise.transfer.comm_log import comm_log
from meshwise.transfer.virtual import virtual_devices


def test_every_path_is_measured_and_seen_by_the_log() -> None:
    heard: list[PathResult] = []
    said: list[str] = []
    with virtual_devices(2), comm_log() as log:
        lanes = measure_in_process(["cpu:0", "cpu:1"], (1024, 4096), 2.0, Progress(said.append, heard.append))
    paths = [(result.source, result.target, result.path) for result in heard]
    ends = [("host", "cpu:0"), ("cpu:0", "host"), ("host", "cpu:1"), ("cpu:1", "host")]
    assert paths == [(*pair, "pageable") for pair in ends]
    assert all(result.wrong is None and result.timings.sizes == (1024, 4096) for result in heard)
    assert lanes == {} and said[0] == "copy host -> cpu:0, pageable"
    assert {(move.source, move.target) for move in log} == {(source, target) for source, target, _ in paths}


def test_a_byte_that_the_copy_loses_is_found() -> None:
    heard: list[PathResult] = []
    with virtual_devices(1) as devices:
        devices.on_copy = lambda dst, src, path: dst.view(-1)[7:8].zero_()
        measure_in_process(["cpu:0"], (1024,), 0.2, Progress(done=heard.append))
    assert [result.wrong is not None and "byte 7 of 1,024" in result.wrong for result in heard] == [True, True]
