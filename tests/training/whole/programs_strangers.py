"""Programs that a stranger wrote: counts as integers, indices of one place, rows that are squeezed away."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from tests.training.whole.shared import Distribute, step, usual


def _batches(distribute: Distribute, rows: int = 13) -> Any:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(rows, 4), torch.randint(0, 3, (rows,)))
    return distribute(DataLoader(data, 6))


def counts_as_integers(distribute: Distribute) -> list[Any]:
    """A sum over rows that is used as a length, an end or a place."""
    left: list[Any] = []
    for x, y in _batches(distribute, 12):
        n = (y == 0).sum()
        left += [x[:n].sum().item(), x[n:].sum().item(), x[:, :n].sum().item(), x.narrow(0, 0, n).sum().item()]
        left += [torch.arange(n).sum().item(), torch.eye(n).sum().item(), len(torch.randperm(n))]
        left += [x[n].sum().item(), x[:, 0].topk(n)[0].sum().item(), x.new_zeros(n, 2).numel()]
        left += [
            torch.maximum(y, n).sum().item(),
            [len(each) for each in x.split([n, 6 - n])],
            x.tensor_split((n,))[0].sum().item(),
        ]
        plain = torch.arange(9.0)
        left += [plain.topk(n)[0].sum().item(), len(torch.multinomial(plain, n)), len(plain.narrow(0, 1, n))]
        left += [int(torch.randint(n, (50,)).max()), plain.roll(n).tolist()]
        left += [(y > 0).nonzero()[:n].sum().item(), x.sort(0)[0][: 2 * n].sum().item()]
    return left


def a_sum_that_is_written(distribute: Distribute) -> list[float]:
    """The value that is written into a row keeps its gradient."""
    left = []
    w = torch.linspace(0, 1, 4, requires_grad=True)
    for x, _ in _batches(distribute, 12):
        rows = x * 1
        rows[0] = (x * w).sum()
        rows[1, 1:] = (x > 0).sum()
        (slope,) = torch.autograd.grad(rows.square().mean(), w)
        left += [rows.sum().item(), *slope.tolist()]
    return left


def places_of_no_dim(distribute: Distribute) -> list[float]:
    """Rows at an index that is a tensor of no dim."""
    left = []
    for x, y in _batches(distribute):
        norms = x.square().sum(1)
        left += [x[norms.argmax()].sum().item(), x[norms.argmin(), 1].item(), x[torch.tensor(0)].sum().item()]
        left += [x[i].sum().item() for i in torch.randperm(len(x))] + [x[y.argmax(), y.argmin()].item()]
    return left


def one_row_squeezed(distribute: Distribute) -> list[Any]:
    """The dim of the rows goes where there is one row, as in the last batch."""
    left: list[Any] = []
    w = torch.linspace(0, 1, 4, requires_grad=True)
    for x, _ in _batches(distribute):
        out = (x * w).sum(1, keepdim=True).squeeze()
        loss = torch.nn.functional.mse_loss(out, torch.zeros_like(out))
        (slope,) = torch.autograd.grad(loss, w)
        left += [
            tuple(out.shape),
            loss.item(),
            slope.tolist(),
            tuple(x[:1].squeeze(0).shape),
            tuple(x[:1].squeeze().shape),
        ]
    return left


class _Stream(IterableDataset[torch.Tensor]):
    """Numbers, dealt to the loader's workers."""

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from (torch.tensor([float(i)]) for i in range(first, 10, every))


def a_stream_of_workers(distribute: Distribute) -> list[Any]:
    """Each worker makes batches of its own, the last of them short."""
    kept = DataLoader(_Stream(), 4, num_workers=2)
    cut = DataLoader(_Stream(), 4, num_workers=2, drop_last=True)
    kept, cut = distribute(kept, cut)
    return [[batch.squeeze(1).tolist() for batch in each] for each in (kept, cut)]


class _Wrapper:
    """Changes the batches of a loader, by a generator."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        for x, y in self.loader:
            yield x * 2, y


def a_wrapper_beside_a_loader(distribute: Distribute) -> list[Any]:
    """The order of a generator's batches is drawn when its first batch is read."""
    torch.manual_seed(4)
    data = TensorDataset(torch.randn(12, 2), torch.arange(12))
    source, target = distribute(_Wrapper(DataLoader(data, 6, shuffle=True)), DataLoader(data, 6, shuffle=True))
    left: list[Any] = []
    for (x, y), (z, w) in zip(source, target, strict=True):
        left += [x.sum().item(), z.sum().item(), y.tolist(), w.tolist()]
    return left


def tensors_read_from_streams(distribute: Distribute) -> list[float]:
    """A buffer is read once, whatever files change meanwhile."""
    distribute(torch.nn.Linear(2, 2))
    buffer, left = io.BytesIO(), []
    torch.save({"w": torch.arange(3.0)}, buffer)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(20):
            Path(folder, f"{number}.txt").write_text("x")
            buffer.seek(0)
            left.append(torch.load(buffer)["w"].sum().item())
    return left


def metrics_of_a_library(distribute: Distribute) -> list[Any]:
    """torchmetrics adds up over ranks where it finds some: what it holds is whole already."""
    total, matrix = torchmetrics.SumMetric(), torchmetrics.ConfusionMatrix("multiclass", num_classes=3)
    for x, y in _batches(distribute):
        total.update(x.sum())
        matrix.update(y.roll(1), y)
    return [total.compute().item(), matrix.compute().tolist()]


def rows_written_into_empty_memory(distribute: Distribute) -> list[float]:
    """What was in the memory before is nothing that ranks compute."""
    left, w = [], torch.ones(4, requires_grad=True)
    for x, _ in _batches(distribute):
        kept = torch.empty(2, *x.shape)
        kept[0], kept[1] = x, x * 2
        (slope,) = torch.autograd.grad((kept * w).square().sum(), w)
        left += [*slope.tolist()]
    return left


def rows_of_a_batch_as_data(distribute: Distribute) -> list[float]:
    """A teacher's answers, which are rows of a batch, are the targets of a data set."""
    model = torch.nn.Linear(4, 2)
    model, loader = distribute(model, DataLoader(torch.randn(10, 4, generator=torch.Generator().manual_seed(1)), 10))
    with torch.no_grad():
        x, answers = next((x, model(x)) for x in loader)
    taught = distribute(DataLoader(TensorDataset(x, answers), 4, shuffle=True))
    return [number for a, b in taught for number in (a.sum().item(), b.square().sum().item())]


def a_loss_beyond_float32(distribute: Distribute) -> list[float]:
    """A loss is read after its backward, also multiplied to more than its dtype can hold."""
    model, optimizer, loader = usual(distribute)
    left: list[float] = []
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        left += [step(loss, optimizer), (loss / 3).item(), float((loss.float() * 1e39).isinf())]
        left += [float((loss.float() * 1e39).item() > 1e300)]
    return left
