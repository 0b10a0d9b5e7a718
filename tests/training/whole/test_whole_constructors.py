"""What bypasses torch's dispatch, or shares memory, holds what one device has: parallel/splits/constructors.py."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import Variable
from torch.nn import functional as F

from meshwise.spec.errors import UsageError
from meshwise.torch_compat.beside_dispatch import replace
from tests.training.whole.running import apart, run, whole
from tests.training.whole.shared import Distribute, step, usual, weights


def constructors(distribute: Distribute) -> Any:
    """Copies batches, and sums over their rows, in all ways that torch's dispatch does not see."""
    model, optimizer, loader = usual(distribute)
    left = []
    for x, y in loader:
        held = torch.zeros(len(x), x.shape[1])
        held.data = x
        taken = torch.zeros(0).set_(x * 1.0)
        center = torch.nn.Parameter(torch.zeros(x.shape[1]))
        center.data = x.mean(0)
        copies = [Variable(x), torch.Tensor(x), x.new(x), torch.zeros(1).new_tensor(x), held, taken, center]
        copies += [torch.DoubleTensor(x), torch.LongTensor(y), torch.DoubleTensor(x.sum(0)), torch.tensor(data=x)]
        for each in (x, x.sum(0)):
            copies += [each.as_subclass(kind) for kind in (torch.Tensor, Own)]
            copies += [torch.Tensor._make_subclass(kind, each) for kind in (torch.Tensor, Own)]
        copies += [*torch.nested.nested_tensor([x, x[:2]]).unbind()]
        copies += [torch.sparse_coo_tensor(torch.arange(len(x))[None], x[:, 0], (30,)).to_dense()]
        left.append([(list(each.shape), each.sum().item(), (each * each).sum().item()) for each in copies])
        left.append([isinstance(each, torch.DoubleTensor) for each in (x, y, y.type(torch.DoubleTensor))])
        left.append(step(F.cross_entropy(model(Variable(x)), Variable(y)), optimizer))
    return left, weights(model)


class Own(torch.Tensor):
    """A class of the program."""


def shared_memory(distribute: Distribute) -> Any:
    """Writes into sums over rows, of which other tensors have the memory, or were made."""
    _, _, loader = usual(distribute)
    left = []
    for x, _ in loader:
        for read in (False, True):
            for derived in (
                torch.detach,
                torch.clone,
                torch.neg,
                lambda s: s.data,
                lambda s: s.view(1),
                lambda s: s * 2,
            ):
                for write in (lambda s: s.add_(1), lambda s: s.mul_(2)):
                    total = x.sum()
                    if read:
                        total.item()
                    other = derived(total)
                    after = other * 3
                    write(total)
                    left.append([other.sum().item(), after.sum().item(), total.item(), write(other).sum().item()])
                    left.append([total.item(), after.sum().item()])
    return left


def refused_by_torch(distribute: Distribute) -> Any:
    """Adds what integers cannot hold to a count of rows."""
    _, _, loader = usual(distribute)
    errors = []
    for x, y in loader:
        for write, by in ((torch.Tensor.add_, 0.5), (torch.Tensor.sub_, 0.5), (torch.Tensor.add_, x.mean())):
            try:
                errors.append(write((y > 0).sum(), by).item())
            except RuntimeError as error:
                errors.append(str(error))
    return errors


def without_gradients(distribute: Distribute) -> Any:
    """Takes and sums rows where torch counts no writes."""
    model, _, loader = usual(distribute)
    left = []
    with torch.inference_mode():
        for x, _ in loader:
            total = model(x).sum()
            total += x[0].sum()
            left.append((x[1:3].tolist(), total.item()))
    return left


def written_arrays(distribute: Distribute) -> list[str]:
    """Writes into the arrays of batches and of sums, whose memory is not that of the tensor."""
    _, _, loader = usual(distribute)
    said, (x, _) = [], next(iter(loader))
    for array in (x.numpy(), np.asarray(x), x.sum(0).numpy()):
        try:
            array[0] = 3
        except ValueError as error:
            said.append(str(error))
    own = np.array(x)
    own[0] = 3
    return said


def devices(distribute: Distribute) -> list[str]:
    """Makes tensors on a device that stands over them."""
    usual(distribute)
    with torch.device("meta"):
        made = [torch.tensor([1.0]), torch.as_tensor([1.0]), torch.arange(3), torch.randperm(3), torch.eye(2)]
    return [each.device.type for each in made]


def saved_models(distribute: Distribute) -> Any:
    """Saves its model whole, and trains on with a copy beside it."""
    model, optimizer, loader = usual(distribute)
    other, left = copy.deepcopy(model), []
    for x, y in loader:
        left.append((step(F.cross_entropy(model(x), y), optimizer), other(x).sum().item()))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))
    extra = sorted(set(vars(loaded[0])) - set(vars(torch.nn.Module())) - {"0", "1"})
    return left, extra, [each(torch.ones(2, x.shape[1])).sum().item() for each in (*loaded, model)]


ALIKE = [constructors, devices, shared_memory, refused_by_torch, without_gradients, saved_models]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor", "ignore:Sparse invariant checks")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("program", ALIKE, ids=lambda program: program.__name__)
def test_what_shares_memory_holds_what_one_device_has(program: Any, pool: Any) -> None:
    for got in pool(2).run(whole, program):
        far, at = apart(got, run(program))
        assert far <= 1e-9, at


def test_a_write_into_the_array_of_a_batch_is_refused_by_numpy(pool: Any) -> None:
    assert pool(2).run(whole, written_arrays) == [["assignment destination is read-only"] * 3] * 2


def test_a_function_is_replaced_in_all_modules_that_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    holder: Any = ModuleType("holder")
    holder.make, holder.other = (made := object()), object()
    monkeypatch.setitem(sys.modules, "holder", holder)
    replace({id(made): "ours"})
    assert holder.make == "ours" and holder.other != "ours"


def keeps_a_sum_over_ranks(distribute: Distribute) -> str:
    model = torch.nn.Linear(2, 2)
    model.join = torch.distributed.all_reduce  # type: ignore[assignment]
    try:
        distribute(model)
    except UsageError as error:
        return str(error)
    return ""


def test_a_model_that_keeps_a_collective_is_refused(pool: Any) -> None:
    for said in pool(2).run(whole, keeps_a_sum_over_ranks):
        assert said.startswith("Linear keeps torch.distributed.all_reduce. ") and "its sum counts 2 times" in said
