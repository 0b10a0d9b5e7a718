"""Words for devices: what is written is what is meant, and a slip is told with what to write instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.devices import (
    DEVICE_KINDS,
    MOST_CPU_WORKERS,
    DeviceRequest,
    WorkerSlot,
    core_ranges,
    parse_devices,
)
from meshwise.spec.errors import UsageError

counted = st.builds(DeviceRequest, st.sampled_from(DEVICE_KINDS), count=st.integers(1, MOST_CPU_WORKERS))
indexed = st.builds(
    DeviceRequest,
    st.sampled_from([kind for kind in DEVICE_KINDS if kind != "cpu"]),
    indices=st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True).map(tuple),
)


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        ("all", DeviceRequest(None)),
        ("4xcpu", DeviceRequest("cpu", count=4)),
        ("cpu", DeviceRequest("cpu", count=1)),
        ("cuda", DeviceRequest("cuda", count=1)),
        (" 2 X CUDA ", DeviceRequest("cuda", count=2)),
        ("cuda:0", DeviceRequest("cuda", indices=(0,))),
        ("cuda:3,1", DeviceRequest("cuda", indices=(3, 1))),
        (f"{MOST_CPU_WORKERS}xcpu", DeviceRequest("cpu", count=MOST_CPU_WORKERS)),
    ],
)
def test_words_are_read_as_they_are_written(words: str, request_: DeviceRequest) -> None:
    assert parse_devices(words) == request_


@given(st.one_of(st.just(DeviceRequest(None)), counted, indexed))
def test_a_request_prints_as_the_words_that_give_it(request_: DeviceRequest) -> None:
    assert parse_devices(str(request_)) == request_


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("0xcpu", "Use 1xcpu"),
        (f"{MOST_CPU_WORKERS + 1}xcpu", f"{MOST_CPU_WORKERS} CPU workers at most"),
        ("cpu:0,1", "Use 2xcpu"),
        ("cuda:1,1", "named twice"),
        ("4xcpus", "Did you mean 'cpu'?"),
        ("2xcudda", "Did you mean 'cuda'?"),
        ("cdua:0", "Did you mean 'cuda'?"),
        ("al", "Did you mean 'all'?"),
        ("4", "Use a count (4xcpu, 2xcuda), indices (cuda:0,1) or all"),
        ("cuda:", "indices (cuda:0,1)"),
        ("cuda:0,", "indices (cuda:0,1)"),
        ("-1xcpu", "Use a count"),
        ("2xcuda:0", "Use a count"),
        ("", "Use a count"),
    ],
)
def test_a_slip_is_told_with_what_to_write_instead(words: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_devices(words)
    assert str(caught.value).startswith(f"--devices {words}: ")
    assert says in str(caught.value)


@given(st.text(max_size=12))
def test_any_text_is_a_request_or_one_sentence(words: str) -> None:
    try:
        assert isinstance(parse_devices(words), DeviceRequest)
    except UsageError as error:
        assert words in str(error)


@pytest.mark.parametrize(
    ("cores", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((7, 4, 5, 1), "1,4-5,7"), ((0, 1), "0-1")]
)
def test_cores_are_written_as_ranges(cores: tuple[int, ...], text: str) -> None:
    assert core_ranges(cores) == text


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_every_core_once(cores: set[int]) -> None:
    named = []
    for piece in filter(None, core_ranges(tuple(cores)).split(",")):
        first, _, last = piece.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(cores)


def test_a_cpu_worker_has_no_index_in_its_name() -> None:
    assert WorkerSlot("cpu", None, (0,), 1).name == "cpu"
    assert WorkerSlot("cuda", 0, (), 1).name == "cuda:0"
