"""Trains by what only programs for a GPU write: `program(distribute, device)`, of which the CPU runs the same lines."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from meshwise.transfer.sharded import full_tensor
from tests.training.whole.shared import Distribute, mlp, rows


def begun(
    distribute: Distribute, device: str, model: nn.Module, data: Any, size: int = 8, *more: Any, **how: Any
) -> Any:
    """A model, an optimizer of one kernel, and a loader that pins its batches."""
    optimizer = torch.optim.AdamW(model.to(device).parameters(), 0.02, fused=True)
    loader = DataLoader(data, size, shuffle=True, pin_memory=device == "cuda", **how)
    return distribute(model, optimizer, loader, *more)


def kept(model: nn.Module) -> list[Tensor]:
    return [full_tensor(value.detach()).cpu() for value in model.state_dict().values()]


def autocast(distribute: Distribute, device: str, dtype: torch.dtype = torch.bfloat16, scale: float = 64.0) -> Any:
    model, optimizer, loader = begun(distribute, device, mlp(), rows())
    scaler, losses = torch.amp.GradScaler(device, init_scale=scale, growth_interval=2), []
    for x, y in [batch for _ in range(2) for batch in loader]:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype):
            out = model(x.to(device, non_blocking=True))
        assert out.dtype == dtype
        loss = F.cross_entropy(out.float(), y.to(device, non_blocking=True))  # outside: autocast's lists differ
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append((loss.item(), norm.item() if norm.isfinite() else -1.0, scaler.get_scale()))
    return losses, kept(model)


fp16_that_overflows = partial(autocast, dtype=torch.float16, scale=2.0**20)


def side_stream(distribute: Distribute, device: str) -> Any:
    """Copies and whitens the next batch on a stream of its own."""
    model, optimizer, loader = begun(distribute, device, mlp(), rows(), num_workers=1)
    side, ready, losses = torch.cuda.Stream() if device == "cuda" else None, None, []
    for batch in [*loader, None]:
        if ready is not None:
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
                for each in ready:
                    each.record_stream(torch.cuda.current_stream())
            loss = F.cross_entropy(model(ready[0]), ready[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        if batch is not None:
            with torch.cuda.stream(side) if side is not None else contextlib.nullcontext():
                x, y = (each.to(device, non_blocking=True) for each in batch)
                ready = (x - x.mean(0)) / x.std(0), y
    return torch.stack(losses).tolist(), kept(model)


def accumulated(distribute: Distribute, device: str) -> Any:
    model = mlp().to(device)
    average, norms = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)), []
    model, optimizer, loader, average = begun(distribute, device, model, rows(), 4, average)
    for number, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x.to(device)), y.to(device)) / 3).backward()
        if number % 3 == 2 or number + 1 == len(loader):
            norms.append(clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    return [full_tensor(each).item() for each in norms], kept(model), kept(average)


class Speaker(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words, self.out = nn.Linear(1, 8), nn.Linear(8, 11)  # an embedding's backward waits
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        later = places[None, :] > places[:, None]
        return self.out(self.body(self.words(words[..., None] / 10), later, src_key_padding_mask=words == 0))


def padded(distribute: Distribute, device: str, dropout: float = 0.0) -> Any:
    """Torch raises where the host waits in a step, unless meshwise looks again at what ranks and model do."""
    first = torch.arange(10)[:, None]
    words = (1 + (first + torch.arange(7)) % 10) * (torch.arange(7) < 3 + first % 5)
    model, optimizer, loader = begun(distribute, device, Speaker(dropout), TensorDataset(words), 5)
    losses, right = [], torch.zeros((), dtype=torch.long, device=device)
    on_wait = torch.cuda.set_sync_debug_mode if device == "cuda" else str
    for number, (batch,) in enumerate([batch for _ in range(5) for batch in loader], 1):
        on_wait("error" if number & (number - 1) else "default")
        batch = batch.to(device, non_blocking=True)
        out, target = model(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(out.flatten(0, 1), target.flatten(), ignore_index=0)
        right += ((out.argmax(-1) == target) & (target != 0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        on_wait("default")
    return right.item(), torch.stack(losses).tolist(), kept(model)


dropped = partial(padded, dropout=0.3)


def drawn(distribute: Distribute, device: str) -> Any:
    model, optimizer, loader = begun(distribute, device, mlp().double(), rows())
    draws = []
    for x, _ in loader:
        x = x.to(device, torch.float64)
        x = x + 0.1 * torch.randn_like(x) * (torch.rand(len(x), 1, device=device) > 0.3)
        out = model(x[torch.randperm(len(x), device=device)])
        action = torch.distributions.Categorical(logits=out).sample()
        optimizer.zero_grad()
        F.cross_entropy(out, action).backward()
        optimizer.step()
        draws.append((action.tolist(), torch.rand(2, device=device).tolist()))
    return draws, kept(model)
