"""copy and to: every layout and dtype arrives as torch's own copy_ would have it, and what cannot be is said."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from meshwise.spec.errors import TransferError, UsageError
from meshwise.spec.machine import Device, Link, Machine
from meshwise.spec.timings import fitted
from meshwise.transfer import path as paths
from meshwise.transfer.checksum import BLOCK_BYTES
from meshwise.transfer.comm_log import comm_log
from meshwise.transfer.copy import copy, to
from meshwise.transfer.devices import VirtualDevices, device_of
from meshwise.transfer.path import choose
from meshwise.transfer.virtual import virtual_devices

PATHS = ["host", "peer", "staged"]


@pytest.fixture(params=PATHS)
def carry(request: pytest.FixtureRequest) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """`carry(dst, src)`: copy on the host, from peer to peer, or staged; gives dst back on the host."""
    if request.param == "host":
        yield lambda dst, src: copy(dst, src, verify=True)
        return
    with virtual_devices(2) as devices:

        def over(dst: Tensor, src: Tensor) -> Tensor:
            devices.places.set(dst, 1)
            devices.places.set(src, 0)
            with comm_log() as log:
                copy(dst, src, path=request.param, verify=True)
            assert [(row.source, row.target, row.path) for row in log] == [("cpu:0", "cpu:1", request.param)]
            with devices.quiet():
                return dst.clone()

        yield over


KINDS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(5, 7),
    "transposed": lambda: torch.randn(5, 7).t(),
    "every second": lambda: torch.randn(9, 8)[::2, ::3],
    "zero-size": lambda: torch.empty(0, 3),
    "zero-size strided": lambda: torch.randn(4, 6)[2:2, ::2],
    "0-d": lambda: torch.tensor(3.5),
    "bool": lambda: torch.rand(13) > 0.5,
    "bool at an odd offset": lambda: (torch.rand(100) > 0.5)[3:],
    "bfloat16": lambda: torch.randn(17).bfloat16(),
    "int8": lambda: torch.arange(-50, 51, dtype=torch.int8),
    "complex": lambda: torch.randn(4, 3, dtype=torch.complex64),
    "conj view": lambda: torch.randn(4, 3, dtype=torch.complex64).conj(),
    "neg view": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "complex part": lambda: torch.randn(6, dtype=torch.complex128).real,
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "nan payloads": lambda: torch.tensor([0x7FC00001, -0x003FFFF0], dtype=torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_arrives(kind: str, carry: Callable[[Tensor, Tensor], Tensor]) -> None:
    src = KINDS[kind]()
    expected = src.clone().contiguous().view(-1).view(torch.uint8) if src.numel() else src.clone()
    found = carry(torch.zeros(src.shape, dtype=src.dtype), src)
    assert found.shape == src.shape
    if src.numel():
        assert torch.equal(found.resolve_conj().resolve_neg().view(-1).view(torch.uint8), expected)


@pytest.mark.parametrize(
    "dst",
    [
        lambda: torch.zeros(7, 5).t(),
        lambda: torch.zeros(10, 14)[::2, ::2],
        lambda: torch.zeros(5, 7, dtype=torch.float64),
        lambda: torch.zeros(5, 7, dtype=torch.float16),
        lambda: torch.zeros(5, 7, dtype=torch.int32),
        lambda: torch.zeros(5, 7, dtype=torch.complex64),
        lambda: torch.zeros(5, 7, dtype=torch.complex64).conj(),
        lambda: torch.zeros(5, 7, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "strided", "wider", "narrower", "int", "complex", "conj", "neg"],
)
def test_every_kind_of_destination_gets_what_torch_would_write(
    dst: Callable[[], Tensor], carry: Callable[[Tensor, Tensor], Tensor]
) -> None:
    src = 100 * torch.randn(5, 7)
    expected = dst().copy_(src).clone()
    assert torch.equal(carry(dst(), src.clone()), expected)


def test_what_lies_between_the_elements_of_a_strided_destination_stays() -> None:
    whole = torch.full((4, 6), 7.0)
    copy(whole[::2, ::3], torch.zeros(2, 2))
    assert whole.sum() == 7 * (24 - 4)


@hypothesis.given(
    st.lists(st.integers(0, 6), max_size=4),
    st.data(),
    st.sampled_from([torch.float32, torch.bool, torch.complex64, torch.int16]),
)
def test_any_view_equals_torchs_copy(shape: list[int], data: st.DataObject, dtype: torch.dtype) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    steps = [data.draw(st.integers(1, 3)) for _ in shape]

    def view(of: Tensor) -> Tensor:
        return of[tuple(slice(None, None, step) for step in steps)].permute(order)

    big = [size * step for size, step in zip(shape, steps, strict=True)]
    src = view(torch.randint(0, 2, big).to(dtype))
    with virtual_devices(2) as devices:
        dst = torch.zeros(src.shape, dtype=dtype, device="cpu:1")
        devices.places.set(src, 0)
        copy(dst, src, path=data.draw(st.sampled_from(["peer", "staged"])), verify=True)
    assert torch.equal(dst, src)


def test_the_staged_path_takes_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "SMALLEST", 1000)
    src = torch.randn(50_001)
    assert paths.chunk_bytes(src.nbytes) == src.nbytes // paths.PARTS
    with virtual_devices(2) as devices:
        devices.places.set(src, 0)
        dst = to(src, "cpu:1", path="staged", verify=True)
        assert device_of(dst) == devices[1]
    assert torch.equal(dst, src)


def test_overlapping_memory_arrives_as_it_was_before() -> None:
    for begin, end in [
        (lambda x: x[1:], lambda x: x[:-1]),
        (lambda x: x[::2], lambda x: x[:5]),
        (lambda x: x[:9].view(3, 3), lambda x: x[:9].view(3, 3).t()),
    ]:
        x = torch.arange(10.0)
        expected = end(x).clone()
        copy(begin(x), end(x))
        assert torch.equal(begin(x), expected)
    x = torch.arange(4.0)
    assert copy(x, x) is x and x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("dst", "src", "said"),
    [
        (torch.zeros(3), torch.zeros(4), r"\(4,\) into \(3,\)"),
        (torch.zeros(2, 3), torch.zeros(3), r"\(3,\) into \(2, 3\)"),
        (torch.zeros(()), torch.zeros(1), r"\(1,\) into \(\)"),
        (torch.zeros(1).expand(3), torch.zeros(3), "share memory"),
        (torch.zeros(5).unfold(0, 2, 1), torch.zeros(4, 2), "share memory"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.complex64), "imaginary"),
        (torch.zeros(2, requires_grad=True), torch.zeros(2), "no_grad"),
        ([0.0], torch.zeros(1), "dst must be a tensor"),
        (torch.zeros(1), "a word", "builtins.str is neither a tensor"),
        (torch.zeros(1), [1.0], "builtins.list is neither a tensor"),
        (torch.zeros(2, 2), torch.eye(2).to_sparse(), "only dense"),
    ],
)
def test_what_cannot_be_copied_is_said(dst: Any, src: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        copy(dst, src)


@pytest.mark.parametrize(
    ("into", "of"), [((1, 3), (3,)), ((1, 1), ()), ((1, 2, 0), (2, 0)), ((1, 2, 3), (1, 2, 3)), ((1, 4), (4,))]
)
def test_leading_dims_of_1_may_be_left_out(into: tuple[int, ...], of: tuple[int, ...]) -> None:
    src = torch.randn(of)
    assert copy(torch.zeros(into), src).flatten().tolist() == src.flatten().tolist()
    with virtual_devices(1):
        assert copy(torch.zeros(into, device="cpu:0"), src, verify=True).flatten().tolist() == src.flatten().tolist()


@pytest.mark.parametrize(
    ("into", "of"), [((3,), (1, 3)), ((3, 1), (3,)), ((2, 3), (3, 2)), ((6,), (2, 3)), ((0,), (1,))]
)
def test_other_shapes_are_refused_on_every_way(into: tuple[int, ...], of: tuple[int, ...]) -> None:
    for verify in (False, True):
        with pytest.raises(UsageError, match="both shapes must be equal"):
            copy(torch.zeros(into), torch.zeros(of), verify=verify)


def test_interleaved_strides_are_no_repetition() -> None:
    dst = torch.zeros(10).as_strided((2, 3), (3, 2))  # elements 0 2 4 and 3 5 7
    assert torch.equal(copy(dst, torch.arange(6.0).view(2, 3)), torch.arange(6.0).view(2, 3))


def test_to_moves_a_tree_and_leaves_the_rest() -> None:
    Pair = namedtuple("Pair", "left right")
    tree = {"a": [torch.ones(2), 3], "b": Pair(torch.zeros(()), "word"), "c": np.arange(3), "d": (None,)}
    with virtual_devices(2) as devices:
        moved = to(tree, devices[1], verify=True)
        places = {device_of(t) for t in (moved["a"][0], moved["b"].left, moved["c"])}
        assert places == {devices[1]}
        again = to(moved, "cpu:1")
        assert again["a"][0] is moved["a"][0]
        back = to(moved, "cpu")
    assert type(moved["b"]) is Pair and moved["b"].right == "word" and moved["a"][1] == 3 and moved["d"] == (None,)
    assert back["c"].tolist() == [0, 1, 2]


def test_to_keeps_dense_strides() -> None:
    src = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with virtual_devices(1):
        dst = to(src, "cpu:0")
        assert dst.stride() == src.stride()
        assert to(torch.zeros(1).expand(4), "cpu:0").stride() == (1,)


def test_to_moves_a_module_in_place_with_gradients_buffers_and_ties() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    net[2].weight = net[0].weight
    net(torch.randn(3, 2)).sum().backward()
    with virtual_devices(2) as devices:
        assert to(net, "cpu:1") is net
        held = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters())]
        assert {device_of(t) for t in held} == {devices[1]}
        assert net[2].weight is net[0].weight and isinstance(net[0].weight, nn.Parameter)
        assert device_of(net(torch.randn(3, 2, device="cpu:1"))) == devices[1]


@pytest.mark.parametrize("path", ["peer", "staged"])
def test_gradients_flow_back_over_the_same_path(path: str) -> None:
    with virtual_devices(2) as devices, comm_log() as log:
        x = torch.randn(3, device="cpu:0", requires_grad=True)
        dst = torch.zeros(3, device="cpu:1")
        copy(dst, x, path=path)
        (to(x, "cpu:1", path=path) * 2 + dst).sum().backward()
        assert x.grad is not None and device_of(x.grad) == devices[0] and x.grad.tolist() == [3, 3, 3]
    assert {row.path for row in log} == {path}
    assert sum(row.operation.endswith("backward") and row.target == "cpu:0" for row in log) == 2


def machine(peer: float | None, staged: float | None, flag: bool | None = None) -> Machine:
    """Two devices with links of these latencies and 10 and 5 GB/s."""
    sizes = [1 << 10, 1 << 20, 1 << 30]
    timings = {
        path: fitted(sizes, [latency + size / rate for size in sizes])
        for path, latency, rate in (("peer", peer, 10e9), ("staged", staged, 5e9))
        if latency is not None
    }
    link = Link("cpu:0", "cpu:1", "process", peer=flag, timings=timings)
    return Machine("test", (Device("cpu:0", "cpu"), Device("cpu:1", "cpu")), (link,))


@pytest.mark.parametrize(
    ("links", "size", "expected"),
    [
        (None, 100, "peer"),
        (machine(1e-6, 2e-6), 100, "peer"),
        (machine(1e-3, 1e-5), 1 << 10, "staged"),
        (machine(1e-3, 1e-5), 1 << 30, "peer"),
        (machine(1e-3, 1e-5, flag=False), 1 << 30, "staged"),
        (machine(None, None, flag=False), 100, "staged"),
        (machine(None, None, flag=True), 100, "peer"),
        (machine(1e-3, None), 100, "peer"),
    ],
)
def test_the_links_choose_the_path_at_this_size(links: Machine | None, size: int, expected: str) -> None:
    assert choose("cpu:0", "cpu:1", size, links=links) == expected
    with virtual_devices(2), comm_log() as log:
        to(torch.zeros(min(size, 1 << 20) // 4, device="cpu:0"), "cpu:1", links=links)
    assert log[0].path == (expected if size < 1 << 20 else choose("cpu:0", "cpu:1", 1 << 20, links=links))


@pytest.mark.parametrize(
    ("ends", "wanted", "links", "said"),
    [
        (("cpu:0", "cpu:1"), "direct", None, "cannot copy from cpu:0 to cpu:1"),
        (("host", "cpu:1"), "staged", None, "copies from device to device"),
        (("cpu:1", "cpu:1"), "peer", None, "copies from device to device"),
        (("cpu:0", "cpu:1"), "pear", None, "Did you mean 'peer'"),
        (
            ("cpu:0", "cpu:1"),
            "peer",
            machine(None, None, flag=False),
            "needs peer access, which cpu:0 and cpu:1 do not have",
        ),
    ],
)
def test_a_path_that_is_not_there_is_refused(
    ends: tuple[str, str], wanted: str, links: Machine | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        choose(*ends, 100, wanted=wanted, links=links)


@pytest.mark.parametrize("device", ["cpu:1", "cuda:99", "nowhere", "cpu:-2"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match=r"device .*cpu:1|device .*cuda:99|device 'nowhere'|device 'cpu:-2'"):
        to(torch.zeros(1), device)


def corrupted(devices: VirtualDevices) -> None:
    def flip(dst: Tensor, src: Tensor, path: str) -> None:
        dst.view(-1).view(torch.uint8)[BLOCK_BYTES + 77] ^= 16

    devices.on_copy = flip


def test_a_difference_is_named_with_its_path_devices_and_offset() -> None:
    with virtual_devices(2) as devices:
        src = torch.randn(200_000, device="cpu:0")
        corrupted(devices)
        with pytest.raises(TransferError) as caught:
            to(src, "cpu:1", path="staged", verify=True)
        to(src, "cpu:1", path="staged")  # nobody asked
    said = str(caught.value)
    element = (BLOCK_BYTES + 77) // 4
    assert "to from cpu:0 to cpu:1 by path 'staged'" in said
    assert f"byte is {BLOCK_BYTES + 77:,} (element {element:,} of 200,000)" in said
    assert caught.value.exit_code == 1


def test_a_copy_on_the_host_is_logged_as_direct() -> None:
    with comm_log() as log:
        copy(torch.zeros(10), torch.ones(10))
        copy(torch.zeros(3), np.ones(3))
    assert [(m.operation, m.source, m.target, m.bytes, m.path) for m in log] == [
        ("copy", "host", "host", 40, "direct"),
        ("copy", "host", "host", 24, "direct"),
    ]
    assert all(move.seconds > 0 for move in log)


gpu = pytest.mark.gpu


@gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("pinned", [False, True])
def test_a_read_right_after_a_copy_from_a_busy_device_is_right(pinned: bool) -> None:
    device = torch.device("cuda", 0)
    src = torch.zeros(1 << 22, device=device)
    torch.cuda._sleep(50_000_000)
    src.fill_(3.0)
    dst = torch.empty(1 << 22, pin_memory=pinned)
    copy(dst, src)
    assert bool((dst == 3).all())
    back = to(dst, device, verify=True)
    dst.zero_()
    assert bool((back == 3).all())


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("path", ["peer", "staged"])
def test_streams_of_both_devices_are_in_order(path: str) -> None:
    if path == "peer" and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two devices that read each other's memory")
    src = torch.zeros(1 << 24, device="cuda:0")
    torch.cuda._sleep(50_000_000)
    src.fill_(3.0)
    with comm_log() as log:
        dst = to(src, "cuda:1", path=path)
        src.zero_()
    assert bool((dst == 3).all())
    assert log[0].seconds > 0


def test_modules_and_dataclasses_inside_containers_are_moved() -> None:
    @dataclass(frozen=True)
    class Batch:
        x: torch.Tensor
        name: str

    with virtual_devices(2):
        layer, batch = torch.nn.Linear(2, 2), Batch(torch.ones(2), "a")
        moved_layer, moved = to([layer, batch], "cpu:1")
        assert moved_layer is layer and str(device_of(layer.weight)) == "cpu:1"
        assert str(device_of(moved.x)) == "cpu:1" and moved.name == "a" and str(device_of(batch.x)) == "cpu"


def test_a_set_of_tensors_is_refused() -> None:
    with pytest.raises(UsageError, match="Pass a list or a dict"):
        to({torch.ones(1)}, "cpu")
    assert to({1, 2}, "cpu") == {1, 2}


@pytest.mark.parametrize(
    ("device", "says"), [("mps", "torch finds no such device"), ("xpu", "torch finds only 0 XPU devices")]
)
def test_a_kind_of_device_that_is_not_here(device: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        to(torch.ones(1), device)
