"""Broadcast, scatter, gather, all-reduce over devices: against torch on one device; every leg is checked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshwise.spec.errors import TransferError, UsageError
from meshwise.spec.machine import Device, Link, Machine
from meshwise.transfer.comm_log import comm_log
from meshwise.transfer.device_collectives import all_reduce, broadcast, gather, scatter
from meshwise.transfer.devices import device_of
from meshwise.transfer.virtual import virtual_devices


def plain(tensor: Tensor) -> Tensor:
    return tensor.cpu()


def test_a_broadcast_is_a_copy_for_each_in_memory_of_its_own() -> None:
    with virtual_devices(3) as devices, comm_log() as log:
        x = torch.randn(4, 5, device="cpu:1")
        parts = broadcast(x, devices, verify=True)
        assert [device_of(part) for part in parts] == list(devices)
        assert all(torch.equal(plain(part), plain(x)) for part in parts)
        parts[1].zero_()
        assert x.abs().sum() > 0 and parts[0].abs().sum() > 0
    rows = [(row.source, row.target, row.bytes) for row in log if row.operation == "broadcast"]
    assert rows == [("cpu:1", f"cpu:{i}", 80) for i in range(3)]


@pytest.mark.parametrize("length", [10, 3, 2, 0])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_and_gather_are_balanced_and_each_others_inverse(length: int, dim: int) -> None:
    shape = [4, 4, 4]
    shape[dim] = length
    x = torch.randn(shape)
    with virtual_devices(4) as devices:
        parts = scatter(x, devices, dim, verify=True)
        assert [part.shape[dim] for part in parts] == [p.shape[dim] for p in x.tensor_split(4, dim)]
        assert [device_of(part) for part in parts] == list(devices)
        whole = gather(parts, "cpu:2", dim, verify=True)
        assert device_of(whole) == devices[2]
        assert torch.equal(plain(whole), x)


def test_sizes_say_who_gets_how_many() -> None:
    with virtual_devices(3) as devices:
        parts = scatter(torch.arange(10), devices, sizes=[7, 0, 3])
        assert [part.tolist() for part in map(plain, parts)] == [list(range(7)), [], [7, 8, 9]]
        for sizes, said in (([5, 5], "one size each"), ([5, 4, 2], "sum exactly to 10"), ([11, -1, 0], "non-negative")):
            with pytest.raises(UsageError, match=said):
                scatter(torch.arange(10), devices, sizes=sizes)


def test_gradients_flow_through_scatter_gather_and_broadcast() -> None:
    with virtual_devices(2) as devices:
        x = torch.randn(5, 2, device="cpu:0", requires_grad=True)
        weight = torch.randn(2, requires_grad=True)
        outs = [part @ w for part, w in zip(scatter(x, devices), broadcast(weight, devices), strict=True)]
        gather(outs, "cpu").square().sum().backward()
        y, v = x.detach().cpu().requires_grad_(), weight.detach().clone().requires_grad_()
        (y @ v).square().sum().backward()
        assert device_of(x.grad) == devices[0] and device_of(weight.grad) == torch.device("cpu")
        assert torch.allclose(plain(x.grad), y.grad) and torch.allclose(weight.grad, v.grad)


@pytest.mark.parametrize("op", ["sum", "mean", "product", "min", "max"])
@pytest.mark.parametrize("numel", [1, 2, 3, 1000])
def test_an_all_reduce_has_the_same_bits_everywhere_and_one_order(op: str, numel: int) -> None:
    terms = [torch.randn(numel) for _ in range(3)]
    a, b, c = terms
    expected = {
        "sum": a + b + c,
        "mean": (a + b + c) / 3,
        "product": a * b * c,
        "min": torch.minimum(a, b).minimum(c),
        "max": torch.maximum(a, b).maximum(c),
    }[op]
    with virtual_devices(3) as devices:
        tensors = [t.to(d) for t, d in zip(terms, devices, strict=True)]
        out = all_reduce(tensors, op, verify=True)
        assert all(a is b for a, b in zip(out, tensors, strict=True))
        assert [device_of(t) for t in out] == list(devices)
        assert all(torch.equal(plain(t), expected) for t in out)


def test_an_all_reduce_moves_what_a_ring_would() -> None:
    with virtual_devices(4) as devices, comm_log() as log:
        all_reduce([torch.ones(1000, device=d) for d in devices])
    crossing = sum(row.bytes for row in log if row.source != row.target)
    assert crossing == 4 * 2 * 3 * 1000  # n ranks, 2 (n - 1) / n of 4000 bytes each
    left = [sum(row.bytes for row in log if row.source == f"cpu:{i}" != row.target) for i in range(4)]
    assert left == [6000] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64])
def test_other_dtypes_and_strides_are_reduced_in_place(dtype: torch.dtype) -> None:
    with virtual_devices(2) as devices:
        wholes = [torch.arange(24, device=d).view(4, 6).to(dtype) for d in devices]
        all_reduce([whole[::2, ::3] for whole in wholes])
        for whole in wholes:
            expected = torch.arange(24).view(4, 6).to(dtype)
            expected[::2, ::3] *= 2
            assert torch.equal(plain(whole), expected)
        scalars = [torch.tensor(2, dtype=dtype, device=d) for d in devices]
        assert [s.item() for s in all_reduce(scalars)] == [4, 4]


def test_links_choose_the_path_of_every_leg() -> None:
    links = Machine("m", (Device("cpu:0", "cpu"),), (Link("device", "device", "pcie", peer=False),))
    with virtual_devices(2) as devices, comm_log() as log:
        all_reduce([torch.ones(10, device=d) for d in devices], links=links)
        gather(broadcast(torch.ones(2, device="cpu:0"), devices, links=links), "cpu:1", links=links)
    assert {row.path for row in log if row.source != row.target} == {"staged"}


def test_what_arrives_wrong_is_found_in_each() -> None:
    with virtual_devices(2) as devices:
        x = torch.ones(8, device="cpu:0")
        there = torch.ones(8, device="cpu:1")
        devices.on_copy = lambda dst, src, path: dst.zero_()
        for name, call in {
            "broadcast": lambda: broadcast(x, devices, verify=True),
            "scatter": lambda: scatter(x, devices, verify=True),
            "gather": lambda: gather([x, there], "cpu:1", verify=True),
            "all-reduce": lambda: all_reduce([x, there], verify=True),
        }.items():
            with pytest.raises(TransferError, match=f"{name} from cpu:. to cpu:. by path 'peer'"):
                call()


def test_what_cannot_be_is_said() -> None:
    x = torch.ones(2)
    for call, said in [
        (lambda: broadcast(x, []), "devices must be a list"),
        (lambda: scatter(x, "cpu:0"), "devices must be a list"),
        (lambda: scatter(torch.tensor(1.0), ["cpu"]), "scatter: "),
        (lambda: scatter(x, ["cpu"], 1), "out of range"),
        (lambda: gather([], "cpu"), "one dtype"),
        (lambda: gather([x, x.double()], "cpu"), "one dtype"),
        (lambda: gather([torch.ones(2, 2), torch.ones(2, 3)], "cpu"), "Sizes of tensors must match"),
        (lambda: gather([torch.tensor(1.0)], "cpu"), "gather: "),
        (lambda: all_reduce([]), "a tensor for each device"),
        (lambda: all_reduce([x, x]), "share memory"),
        (lambda: all_reduce([x, torch.ones(3)]), r"\(2,\) and .*\(3,\)"),
        (lambda: all_reduce([x], "avg"), "Use one of sum, mean"),
        (lambda: all_reduce([x > 0], "sum"), "Convert"),
        (lambda: all_reduce([x.long()], "mean"), "Convert"),
        (lambda: all_reduce([x.cfloat()], "max"), "no order"),
        (lambda: all_reduce([torch.ones(1).expand(3), torch.ones(3)]), "share memory"),
    ]:
        with pytest.raises(UsageError, match=said):
            call()


def test_views_that_share_memory_are_no_tensors_to_reduce() -> None:
    x = torch.arange(9.0)
    with pytest.raises(UsageError, match="share memory"):
        all_reduce([x[:6], x[3:9]])
    assert torch.equal(x, torch.arange(9.0))


def test_what_is_no_tensor_or_must_not_change_is_told() -> None:
    with pytest.raises(UsageError, match="in place, but ndarray is not a tensor"):
        all_reduce([torch.ones(2).numpy()])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="one tensor requires grad"):
        all_reduce([torch.ones(2, requires_grad=True), torch.ones(2)])
    with pytest.raises(UsageError, match="list is neither a tensor nor an array"):
        scatter([1, 2], ["cpu"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="int is neither a tensor nor an array"):
        gather([1, 2], "cpu")  # type: ignore[list-item]


def test_arrays_are_scattered_and_gathered_as_tensors_are() -> None:
    with virtual_devices(2) as devices:
        parts = scatter(torch.arange(5).numpy(), devices)  # type: ignore[arg-type]
        assert [part.tolist() for part in map(plain, parts)] == [[0, 1, 2], [3, 4]]
    assert gather([torch.ones(2).numpy(), torch.zeros(1).numpy()], "cpu").tolist() == [1, 1, 0]  # type: ignore[list-item]


@pytest.mark.parametrize("verb", ["all_reduce", "gather"])
def test_one_tensor_is_no_list_of_tensors_of_devices(verb: str) -> None:
    gradient = torch.tensor([1.0, 2.0])
    with pytest.raises(
        UsageError,
        match=rf"mw\.{verb} takes a list .* given one tensor. To combine tensors of several ranks, write mw\.",
    ):
        {"all_reduce": all_reduce, "gather": lambda tensor: gather(tensor, "cpu")}[verb](gradient)  # type: ignore[operator]
    assert gradient.tolist() == [1, 2], "its elements are not added up"
