"""Strict virtual devices: results live where their inputs do, mixing raises, every byte goes through the one copy."""

from __future__ import annotations

import copy as copying
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwise.spec.errors import UsageError
from meshwise.transfer.comm_log import comm_log
from meshwise.transfer.copy import copy, to
from meshwise.transfer.devices import OPEN_DEVICES, device_of
from meshwise.transfer.virtual import virtual_devices

CPU = torch.device("cpu")


def place(tensor: Tensor | None) -> str:
    assert tensor is not None
    return str(device_of(tensor))


MAKERS: list[Callable[[str], Tensor]] = [
    lambda d: torch.zeros(3, device=d),
    lambda d: torch.empty(3, device=torch.device(d)),
    lambda d: torch.tensor([1.0], device=d),
    lambda d: torch.tensor(1.0, device=d),
    lambda d: torch.as_tensor([1.0], device=d),
    lambda d: torch.as_tensor(torch.ones(1), device=d),
    lambda d: torch.asarray([1.0], device=d),
    lambda d: torch.randn(2, 2, device=d, requires_grad=True),
    lambda d: torch.arange(4, device=d),
    lambda d: torch.full((2,), 1.0, device=d),
    lambda d: torch.zeros_like(torch.ones(2), device=d),
    lambda d: torch.ones(2).new_zeros(3, device=d),
    lambda d: torch.ones(2).to(d),
    lambda d: torch.ones(2).to(device=d, dtype=torch.float64),
    lambda d: torch.ones(2).to(torch.zeros(1, device=d)),
    lambda d: torch.ones(2).to(d, torch.float16, copy=True),
    lambda d: to(torch.ones(2), d),
    lambda d: nn.Linear(2, 2, device=d).weight,
    lambda d: nn.Linear(2, 2).to(d).bias,
    lambda d: copying.deepcopy(torch.ones(2).to(d)),
    lambda d: nn.Parameter(torch.ones(2, device=d)),
]


@pytest.mark.parametrize("make", MAKERS)
def test_whatever_is_made_on_a_device_lives_there(make: Callable[[str], Tensor]) -> None:
    with virtual_devices(3) as devices:
        for device in devices:
            made = make(str(device))
            assert device_of(made) == made.device == device
            assert not made.is_leaf or made.grad is None


def test_a_default_device_is_obeyed() -> None:
    with virtual_devices(2), torch.device("cpu:1"):
        assert place(torch.zeros(2)) == place(torch.tensor([1.0])) == place(nn.Linear(2, 2).weight) == "cpu:1"


RESULTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x + 1,
    lambda x: x + torch.tensor(2.0),
    lambda x: torch.tensor(2.0) * x,
    lambda x: x[1:],
    lambda x: x.t().contiguous(),
    lambda x: x.sum(),
    lambda x: x.detach(),
    lambda x: x.add_(1),
    lambda x: x[torch.tensor([0, 1])],
    lambda x: x[x > 0],
    lambda x: torch.zeros_like(x),
    lambda x: x.new_ones(3),
    lambda x: x.to(torch.float64),
    lambda x: torch.cat([x, x]),
    lambda x: torch.stack([x, x]).unbind()[1],
    lambda x: torch.max(x, dim=0).indices,
    lambda x: F.softmax(x, 0),
    lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64, device=x.device)),
    lambda x: F.dropout(x),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: torch.einsum("ij,kj->ik", x, x),
    lambda x: torch.linalg.qr(x).Q,
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: F.pad(x, (1, 1)),
    lambda x: x.clone().masked_fill_(x > 0, 1.0),
    lambda x: torch.zeros(3, 3, device=x.device).copy_(x),
    lambda x: torch.add(x, x, out=torch.empty(3, 3, device=x.device)),
    lambda x: x.view(torch.int32),
    lambda x: copying.deepcopy(x),
]


@pytest.mark.parametrize("compute", RESULTS)
def test_results_live_where_their_inputs_do(compute: Callable[[Tensor], Tensor]) -> None:
    with virtual_devices(3):
        assert place(compute(torch.randn(3, 3, device="cpu:2"))) == "cpu:2"
        assert place(compute(torch.randn(3, 3))) == "cpu"


MIXES: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
    ("add", lambda a, b: a + b),
    ("add_", lambda a, b: a.add_(b)),
    ("mm", lambda a, b: a @ b),
    ("cat", lambda a, b: torch.cat([a, b])),
    ("stack", lambda a, b: torch.stack([a, b])),
    ("add", lambda a, b: torch.add(a, a, out=b)),
    ("where", lambda a, b: torch.where(a > 0, b, b)),
    ("addmm", lambda a, b: F.linear(a, a, b[0])),
    ("index_select", lambda a, b: torch.index_select(a, 0, (b[0] > 9).long())),
]


@pytest.mark.parametrize(("name", "mix"), MIXES)
@pytest.mark.parametrize("ends", [("cpu:0", "cpu:1"), ("cpu:1", "cpu"), ("cpu", "cpu:1")])
def test_mixing_two_places_names_the_operator_and_both(
    name: str, mix: Callable[[Tensor, Tensor], Any], ends: tuple[str, str]
) -> None:
    with virtual_devices(2):
        a, b = (torch.ones(2, 2, device=end) for end in ends)
        with pytest.raises(UsageError) as caught:
            mix(a, b)
    said = str(caught.value)
    assert said.startswith(f"{name} mixes tensors of ") and f"{ends[0]}" in said and f"{ends[1]}" in said
    assert "mw.to(tensor" in said


def test_a_0_d_tensor_of_the_host_is_read_anywhere_but_not_written_from_a_device() -> None:
    with virtual_devices(2):
        x = torch.ones(2, device="cpu:1")
        x.mul_(torch.tensor(3.0))
        assert x.tolist() == [3, 3]
        with pytest.raises(UsageError, match="add_ mixes"):
            torch.tensor(1.0).add_(x.sum())
        with pytest.raises(UsageError, match="mixes"):
            torch.ones(2, device="cpu:0") + torch.tensor(1.0, device="cpu:1")


def test_copies_between_places_are_routed_logged_and_seen_by_the_hook() -> None:
    seen: list[tuple[int, str]] = []
    with virtual_devices(2) as devices, comm_log() as log:
        devices.on_copy = lambda dst, src, path: seen.append((dst.nbytes, path))
        x = torch.arange(4.0, device="cpu:0")
        y = torch.zeros(4, device="cpu:1")
        y.copy_(x)
        y[:2] = x[2:]
        z = torch.zeros(4)
        copy(z, y)
        copy(y, y.clone())  # within one place: no crossing
        host = y.cpu()
        assert y.to("cpu:1") is y and host.to("cpu") is host and place(host) == "cpu"
    assert z.tolist() == [2, 3, 2, 3]
    assert seen == [(16, "peer"), (8, "peer"), (16, "direct"), (16, "direct")]
    crossing = [row for row in log if row.source != row.target]
    assert [(row.source, row.target, row.bytes) for row in crossing] == [
        ("cpu:0", "cpu:1", 16),
        ("cpu:0", "cpu:1", 8),
        ("cpu:1", "host", 16),
        ("cpu:1", "host", 16),
    ]


def test_a_hook_can_corrupt_what_arrives() -> None:
    with virtual_devices(2) as devices:
        devices.on_copy = lambda dst, src, path: dst.zero_()
        assert to(torch.ones(3, device="cpu:0"), "cpu:1").tolist() == [0, 0, 0]
        devices.on_copy = None
        assert to(torch.ones(3, device="cpu:0"), "cpu:1").tolist() == [1, 1, 1]


def test_a_freed_storage_loses_its_place_and_a_new_one_there_has_none() -> None:
    with virtual_devices(2) as devices:
        for _ in range(300):  # the allocator gives the same addresses again
            x = torch.zeros(1000, device="cpu:1")
            del x
            assert place(torch.zeros(1000)) == "cpu"
        view = torch.zeros(10, device="cpu:1")[2:4]
        gc.collect()
        assert len(devices.places) == 1 and place(view) == "cpu:1"


def test_many_dead_storages_are_forgotten() -> None:
    with virtual_devices(1) as devices:
        for _ in range(5000):
            torch.zeros(1, device="cpu:0")
        assert len(devices.places._facts) < 1100


def test_a_network_over_two_devices_learns_as_on_one() -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
        )

    x, y = torch.randn(6, 1, 8, 8), torch.randint(5, (6,))

    def losses(move: bool) -> list[float]:
        model, found = net(), []
        if move:
            model[:3].to("cpu:0")
            model[3:].to("cpu:1")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            if move:
                out = model[3:](to(model[:3](to(x, "cpu:0")), "cpu:1"))
                loss = F.cross_entropy(out, to(y, "cpu:1"))
            else:
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model[3:].parameters(), 1.0)
            if move:
                assert [place(p) for p in model.parameters()] == ["cpu:0"] * 4 + ["cpu:1"] * 2
                assert [place(p.grad) for p in model.parameters()] == ["cpu:0"] * 4 + ["cpu:1"] * 2
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = losses(False)
    with virtual_devices(2):
        assert losses(True) == plain


def test_a_transformer_layer_and_an_lstm_stay_on_their_device() -> None:
    with virtual_devices(2):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device="cpu:1")
        lstm = nn.LSTM(8, 8, batch_first=True, device="cpu:1")
        out, _ = lstm(layer(torch.randn(2, 3, 8, device="cpu:1")))
        out.square().mean().backward()
        both = [*layer.parameters(), *lstm.parameters()]
        assert place(out) == "cpu:1" and {place(p.grad) for p in both} == {"cpu:1"}
        embedding = nn.Embedding(5, 3, device="cpu:0")
        with pytest.raises(UsageError, match="embedding mixes"):
            embedding(torch.tensor([1, 2], device="cpu:1"))


def test_an_own_function_may_make_tensors_in_its_backward() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.full((3,), 2.0)

    with virtual_devices(2):
        x = torch.ones(3, device="cpu:1", requires_grad=True)
        Twice.apply(x).sum().backward()
        assert place(x.grad) == "cpu:1"


def test_a_state_dict_is_loaded_across_places() -> None:
    with virtual_devices(2):
        here, there = nn.Linear(2, 2), nn.Linear(2, 2, device="cpu:1")
        there.load_state_dict(here.state_dict())
        assert place(there.weight) == "cpu:1" and there.weight.tolist() == here.weight.tolist()


def test_numpy_is_refused_on_a_device_and_given_on_the_host() -> None:
    with virtual_devices(1):
        x = torch.ones(2, device="cpu:0")
        with pytest.raises(UsageError, match=r"mw\.to\(tensor, 'cpu'\)"):
            x.numpy()
        assert x.cpu().numpy().tolist() == x.tolist() == [1, 1] and x.sum().item() == 2


@pytest.mark.parametrize("count", [0, -1, 5000])
def test_an_impossible_count_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="must be an integer from 1 to"), virtual_devices(count):
        pass


def test_worlds_do_not_nest_and_end_with_their_block() -> None:
    with virtual_devices(2) as devices:
        assert len(devices) == 2 and devices[:1] == [torch.device("cpu:0")]
        x = torch.ones(2, device="cpu:1")
        with pytest.raises(UsageError, match="open already"), virtual_devices(2):
            pass
        with pytest.raises(UsageError, match="cpu:0 to cpu:1"):
            torch.zeros(1, device="cpu:2")
    assert OPEN_DEVICES == [] and device_of(x) == CPU and (x + torch.ones(2)).tolist() == [2, 2]


def test_values_by_keyword_and_new_tensors_have_their_place() -> None:
    with virtual_devices(2):
        x = torch.ones(1, device="cpu:1")
        assert str(device_of(torch.tensor(data=[1.0], device="cpu:1"))) == "cpu:1"
        assert str(device_of(torch.as_tensor(data=[1.0], device="cpu:1"))) == "cpu:1"
        assert str(device_of(x.new_tensor([3]))) == "cpu:1"
        y = torch.zeros(1, device="cpu:1")
        assert y.copy_(other=x).cpu().item() == 1.0
