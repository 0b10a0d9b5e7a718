"""A script with the two lines, of bench/gpu.py: a small transformer, trained the ways that exist on a GPU alone.

meshwise run gpu_script.py WAY LOSSES         writes the losses of each step to the file LOSSES
python gpu_script.py WAY LOSSES plain         the same without the two lines
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_jobs import WORDS, Transformer
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

way, where, plain = sys.argv[1], Path(sys.argv[2]), len(sys.argv) > 3
STEPS, BATCH, WIDTH, LENGTH = 24, 8, 256, 128

torch.manual_seed(0)
torch.use_deterministic_algorithms(mode=True)
torch.backends.cudnn.benchmark = False
tokens = torch.randint(WORDS, (STEPS * BATCH, LENGTH + 1))
loader = DataLoader(TensorDataset(tokens), batch_size=BATCH, shuffle=True, pin_memory=way != "graph", num_workers=2)
model = Transformer(2, WIDTH, LENGTH, causal=True).cuda()
fused = {"fused": True} if way == "fused" else {"capturable": True} if way == "graph" else {}
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **fused)
scaler = torch.amp.GradScaler(enabled=way == "fp16")
half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(way)

if not plain:
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
if way in ("compile", "reduce-overhead"):
    model.compile(**({"mode": way} if way == "reduce-overhead" else {}))


def step(words: torch.Tensor) -> torch.Tensor:
    """One training step; returns its loss."""
    optimizer.zero_grad()
    with torch.autocast("cuda", half, enabled=half is not None):
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())
    if plain:
        scaler.scale(loss).backward()
    else:
        loss = mw.backward(scaler.scale(loss))
    if way == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if way == "fp16":
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    return loss.detach()


def graphed() -> list[float]:
    """Three steps on a side stream, then one step captured and played again: torch's recipe."""
    given, held, losses = torch.zeros(BATCH, LENGTH + 1, dtype=torch.long, device="cuda"), None, []
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for number, (words,) in enumerate(loader):
        given.copy_(words)
        if number < 3:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                held = step(given)
            torch.cuda.current_stream().wait_stream(side)
        else:
            if number == 3:
                with torch.cuda.graph(graph):
                    held = step(given)
            graph.replay()
        losses.append(float(held))
    return losses


if way == "stream":
    torch.cuda.set_stream(torch.cuda.Stream())
losses = graphed() if way == "graph" else [float(step(words.cuda(non_blocking=True))) for (words,) in loader]
where.write_text(json.dumps(losses))
