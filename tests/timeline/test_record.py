"""The recorder: spans as they happened, handed on when asked, and the phase in which an error came."""

import pytest

from meshwise.timeline import record
from meshwise.timeline.record import Recorder
from meshwise.timeline.spans import Span


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """What a sink was given; the clock goes on by 1 ns at each look."""
    clock = iter(range(10_000))
    monkeypatch.setattr(record.time, "perf_counter_ns", lambda: next(clock))
    return []


def test_a_span_has_its_kind_its_times_and_its_step(kept: list[Span]) -> None:
    recorder = Recorder(kept.extend)
    with recorder.span("data", "read", on_device=False):
        pass
    recorder.step = 7
    with recorder.span("forward"):
        pass
    recorder.flush()
    assert kept == [Span("data", 0, 1, 0, "read"), Span("forward", 2, 3, 7)]


def test_spans_inside_others_lie_within_them(kept: list[Span]) -> None:
    recorder = Recorder(kept.extend)
    with recorder.span("backward"):
        start = recorder.mark()
        recorder.add("communication", start, recorder.mark(), "all-reduce", 4096)
    recorder.flush()
    assert kept == [Span("communication", 1, 2, 0, "all-reduce", 4096), Span("backward", 0, 3, 0)]


def test_each_span_is_handed_on_once(kept: list[Span]) -> None:
    recorder = Recorder(kept.extend)
    with recorder.span("data"):
        recorder.flush()
        assert kept == []  # it is still open
    recorder.flush()
    recorder.flush()
    assert len(kept) == 1


class Running:
    """Stands for a CUDA event: device work that has passed only when we say so."""

    passed = False

    def query(self) -> bool:
        return self.passed


def test_device_work_that_still_runs_waits_for_a_later_flush(kept: list[Span], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, end = Recorder(kept.extend), Running()
    monkeypatch.setattr(recorder, "_time", lambda mark: mark if isinstance(mark, int) else 99)
    recorder.add("forward", 5, end)  # type: ignore[arg-type]
    recorder.add("data", 6, 7)
    recorder.flush()
    assert kept == [Span("data", 6, 7, 0)]
    end.passed = True
    recorder.flush()
    assert kept[1:] == [Span("forward", 5, 99, 0)]


def test_the_phase_is_that_of_the_innermost_open_span(kept: list[Span]) -> None:
    recorder = Recorder(kept.extend)
    assert recorder.phase == "idle"
    with recorder.span("evaluate"):
        with recorder.span("data"):
            assert recorder.phase == "data"
        assert recorder.phase == "evaluate"
    assert recorder.phase == "idle"


def test_after_an_error_the_phase_in_which_it_came_stays_and_its_span_is_kept(kept: list[Span]) -> None:
    recorder = Recorder(kept.extend)
    with pytest.raises(ValueError), recorder.span("evaluate"), recorder.span("data"):
        raise ValueError
    recorder.flush()
    assert recorder.phase == "data"
    assert [span.kind for span in kept] == ["data", "evaluate"]


def test_without_a_sink_nothing_piles_up() -> None:
    recorder = Recorder()
    with recorder.span("data"):
        pass
    recorder.flush()
    assert recorder._raw == []
