"""Words for devices: what is written is what is meant, and a slip is told with what to write instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.device_words import KINDS, MOST_CPU_WORKERS, DeviceRequest, parse_devices
from meshwise.spec.errors import UsageError

counted = st.builds(DeviceRequest, st.sampled_from(KINDS), count=st.integers(1, MOST_CPU_WORKERS))
indexed = st.builds(
    DeviceRequest,
    st.sampled_from([kind for kind in KINDS if kind != "cpu"]),
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
        ("0xcpu", "Write 1xcpu"),
        (f"{MOST_CPU_WORKERS + 1}xcpu", f"at most {MOST_CPU_WORKERS}"),
        ("cpu:0,1", "Write 2xcpu"),
        ("cuda:1,1", "named twice"),
        ("4xcpus", "Did you mean 'cpu'?"),
        ("2xcudda", "Did you mean 'cuda'?"),
        ("cdua:0", "Did you mean 'cuda'?"),
        ("al", "Did you mean 'all'?"),
        ("4", "Write a count (4xcpu, 2xcuda), indices (cuda:0,1) or all"),
        ("cuda:", "indices (cuda:0,1)"),
        ("cuda:0,", "indices (cuda:0,1)"),
        ("-1xcpu", "Write a count"),
        ("2xcuda:0", "Write a count"),
        ("", "Write a count"),
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
