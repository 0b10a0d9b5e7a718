"""Arrays of other libraries: zero copy is proved by writing through one and reading the other, a copy is in the log."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from meshwise.spec.errors import UsageError
from meshwise.transfer.comm_log import comm_log
from meshwise.transfer.copy import copy, to
from meshwise.transfer.interop import from_array, is_array


class ByDlpack:
    """As CuPy and JAX arrays are seen from outside: nothing but DLPack."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **words: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class ByCudaInterface:
    def __init__(self, **facts: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (3,),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            "strides": None,
        } | facts


class WithClassInterface:
    """CuPy has it as a property of the class."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (1,), "typestr": "<f4", "data": (4096, False), "version": 3, "mask": object()}


@pytest.mark.parametrize("wrap", [lambda array: array, ByDlpack])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint8", "complex64", "bool"])
def test_an_array_of_the_host_shares_its_memory(wrap: Any, dtype: str) -> None:
    array = np.zeros((3, 4), dtype)
    with comm_log() as log:
        tensor = from_array(wrap(array))
        view = from_array(wrap(array[::2, 1:]))
        array[0, 1] = 1
        tensor[2, 2] = 1
    assert tensor[0, 1] == 1 and array[2, 2] == 1 and view[0, 0] == 1 and view[1, 1] == 1
    assert tuple(view.shape) == (2, 3) and len(log) == 0


@pytest.mark.parametrize(
    "array",
    [np.arange(5.0)[::-1], np.broadcast_to(np.float32(2), (3,)), np.arange(3, dtype=">i4"), np.array(1.5)[()]],
    ids=["backwards", "read-only", "byte-swapped", "scalar"],
)
def test_what_cannot_be_shared_is_copied_and_told(array: Any) -> None:
    if not isinstance(array, np.ndarray):
        assert not is_array(array)
        return
    with comm_log() as log:
        tensor = from_array(array)
    assert tensor.tolist() == array.tolist()
    assert [(row.operation, row.source, row.target, row.bytes, row.path) for row in log] == [
        ("convert", "host (numpy)", "host", tensor.nbytes, "copied")
    ]
    tensor.zero_()
    assert array.any()


def test_copy_and_to_take_arrays() -> None:
    array = np.arange(6.0).reshape(2, 3)
    dst = torch.zeros(2, 3)
    copy(dst, array, verify=True)
    assert dst.tolist() == array.tolist()
    copy(dst, ByDlpack(array * 2))
    assert dst.tolist() == (array * 2).tolist()
    tree = to({"a": ByDlpack(array), "b": [array], "c": "word"}, "cpu")
    array[0, 0] = 9
    assert tree["a"][0, 0] == 9 and tree["b"][0][0, 0] == 9 and tree["c"] == "word"


@pytest.mark.parametrize("broken", [BufferError, TypeError, RuntimeError])
def test_an_array_whose_dlpack_fails_goes_another_way_or_is_refused(broken: type[Exception]) -> None:
    class Refuses(ByDlpack):
        def __dlpack__(self, **words: Any) -> Any:
            raise broken("not now")

    class ThroughNumpy(Refuses):
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            return self.array

    with pytest.raises(UsageError, match=r"Refuses: DLPack failed \(not now\)"):
        from_array(Refuses(np.zeros(2)))
    with comm_log() as log:
        assert from_array(ThroughNumpy(np.ones(2))).tolist() == [1, 1]
    assert log[0].path == "copied" and "ThroughNumpy" in log[0].source


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array(["word"]), "torch does not support (the )?dtype"),
        (np.array([object()]), "torch does not support (the )?dtype"),
        (np.array(["word"])[::-1], "torch does not support (the )?dtype"),
        ([1, 2], "builtins.list is neither a tensor"),
        (None, "NoneType is neither a tensor"),
        (WithClassInterface(), "a masked array"),
        (ByCudaInterface(mask=object()), "a masked array"),
    ],
)
def test_what_is_no_array_for_torch_is_refused(array: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        from_array(array)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here torch sees CUDA")
def test_device_memory_without_a_device_is_refused() -> None:
    for array in (ByCudaInterface(), ByCudaInterface(stream=1)):
        with pytest.raises(UsageError, match="torch finds none"):
            from_array(array)


@pytest.fixture
def pretended_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Streams that write down who waits for whom, and memory that is not looked at."""
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream("current"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: Stream("default"))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, *_: Stream(f"stream {pointer}"))
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: (said.append(device), torch.zeros(3))[1])
    return said


@pytest.mark.parametrize(
    ("stream", "waits"),
    [(None, []), (1, ["current waits for default"]), (12345, ["current waits for stream 12345"])],
)
def test_the_stream_of_a_cuda_interface_is_waited_for(
    pretended_cuda: list[str], stream: int | None, waits: list[str]
) -> None:
    from_array(ByCudaInterface(stream=stream))
    assert pretended_cuda == [*waits, "cuda"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_real_cuda_interface_shares_memory() -> None:
    class Other:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__ | {"stream": 1}

    owner = torch.zeros(3, device="cuda")
    tensor = from_array(Other(owner))
    owner[1] = 2
    assert tensor.tolist() == [0, 2, 0]
