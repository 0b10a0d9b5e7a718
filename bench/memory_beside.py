"""Memory of a run on two CPU workers beside torchrun's DDP: all of its processes, and the largest of them.

    python bench/memory_beside.py [--rounds 3] [--source CHECKOUT] [--only gpt]

MNIST's tutorial network, an epoch in batches of 512: DDP by hand under torchrun, the same script with our two lines,
and our job, with and without states in memory that outlives a worker. A transformer of 20 million parameters, as a job
under shard, tensor and pipeline, beside torch's FSDP2, parallelize_module and ScheduleGPipe under torchrun; all of them
save the weights at their end. Pages that processes share count once: the sum of PSS over the command and all that it
starts; and of the largest process what is its own (USS). Both are the most that was seen, every 100 ms; the figures are
medians of the rounds. Goal: at most 1.05 without redundancy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "src" / "meshwise" / "jobs" / "data" / "mnist"
SCRIPT = """import gzip, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{begin}
def read(name, head):
    with gzip.open(f"{{sys.argv[1]}}/train-{{name}}-ubyte.gz") as file:
        return torch.frombuffer(bytearray(file.read()[head:]), dtype=torch.uint8)
data = TensorDataset(read("images-idx3", 16).view(-1, 784), read("labels-idx1", 8))
model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
{distribute}
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x / 255), y.long())
    {backward}
    optimizer.step()
    optimizer.zero_grad()
"""
HAND = SCRIPT.format(
    begin="import torch.distributed as dist\ndist.init_process_group('gloo')",
    distribute="model = nn.parallel.DistributedDataParallel(model)\n"
    "loader = DataLoader(data, 256, sampler=torch.utils.data.DistributedSampler(data))",
    backward="loss.backward()",
)
OURS = SCRIPT.format(
    begin="import meshwise as mw",
    distribute="model, optimizer, loader = mw.distribute(model, optimizer, DataLoader(data, 512, shuffle=True))",
    backward="mw.backward(loss)",
)
GPT = """import torch
from torch import nn
class Block(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.rise, self.fall = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        y = self.before(x)
        heads = [part(y).unflatten(-1, (-1, 64)).transpose(1, 2) for part in (self.q, self.k, self.v)]
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.fall(nn.functional.gelu(self.rise(self.between(x))))
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8192, 384), *(Block() for _ in range(8)), nn.LayerNorm(384), nn.Linear(384, 8192))
def score(output, tokens):
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())
tokens = torch.randint(8192, (64, 128), generator=torch.Generator().manual_seed(0))
"""
GPT_JOB = f"""{GPT}
import meshwise as mw
def job():
    return mw.Job(model=network, loss=lambda model, batch: score(model(batch[0]), batch[0]), data=(tokens,),
                  optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3), batch_size=8, epochs=1)
"""
BY_HAND = {
    "shard=2": """from torch.distributed.fsdp import fully_shard
for block in model[1:9]:
    fully_shard(block)
fully_shard(model)
batches = tokens.view(8, 2, 4, 128)[:, rank]
""",
    "tensor=2": """from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh, cut = init_device_mesh("cpu", (2,)), {}
for number in range(1, 9):
    cut |= {f"{number}.{name}": ColwiseParallel() for name in ("q", "k", "v", "rise")}
    cut |= {f"{number}.{name}": RowwiseParallel() for name in ("out", "fall")}
parallelize_module(model, mesh, cut)
batches = tokens.view(8, 8, 128)
""",
    "pipeline=2": """from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
model = model[:5] if rank == 0 else model[5:]
schedule = ScheduleGPipe(PipelineStage(model, rank, 2, torch.device("cpu")), 2, loss_fn=score)
batches = tokens.view(8, 8, 128)
""",
}
GPT_HAND = """{gpt}
import torch.distributed as dist
dist.init_process_group("gloo")
rank, model = dist.get_rank(), network()
{plan}
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for batch in batches:
    {step}
    optimizer.step()
    optimizer.zero_grad()
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if weights:
    torch.save(weights, f"weights-{{rank}}.pt")
"""
PLAIN_STEP = "score(model(batch), batch).backward()"
STAGE_STEP = "schedule.step(batch) if rank == 0 else schedule.step(target=batch, losses=[])"
TORCHRUN = "torchrun, DDP by hand"


def processes(root: int) -> list[int]:
    """A process and all that it has started."""
    found, ahead = [], [root]
    while ahead:
        found.append(ahead.pop())
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{found[-1]}/task").iterdir():
                ahead += map(int, (task / "children").read_text().split())
    return found


def memory_of(process: int) -> tuple[int, int]:
    """Bytes of PSS and USS."""
    lines = (line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:])
    kilobytes = {words[0]: int(words[1]) for words in lines}
    return kilobytes["Pss:"] << 10, (kilobytes["Private_Clean:"] + kilobytes["Private_Dirty:"]) << 10


def most(words: list[str], folder: Path, source: Path) -> tuple[int, int]:
    """The most that a command and its processes hold at once, in PSS; and the largest of them, in USS."""
    environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    began = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    whole = largest = 0
    while began.poll() is None:
        seen = []
        for process in processes(began.pid):
            with contextlib.suppress(OSError, KeyError):
                seen.append(memory_of(process))
        whole, largest = max(whole, sum(pss for pss, _ in seen)), max(largest, *(uss for _, uss in seen), 0)
        time.sleep(0.1)
    if began.returncode:
        raise SystemExit(f"{words} ended with {began.returncode}")
    return whole, largest


def main() -> None:
    """Measure by turns, print, keep."""
    from keep import RESULTS, keep

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", type=Path, default=ROOT)
    parser.add_argument("--only", default="", choices=["", "mnist", "gpt"])
    options = parser.parse_args()
    run = [sys.executable, "-m", "meshwise", "run", "--devices", "2xcpu"]
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = [*run, "--epochs", "1", "--batch-size", "512", "mnist-mlp"]
    commands = {
        TORCHRUN: [*runner, "hand.py", str(DATA)],
        "script": [*run, "ours.py", str(DATA)],
        "job": job,
        "job, --redundancy 0": [*job, "--redundancy", "0"],
    }
    if options.only == "gpt":
        commands = {}
    for plan in BY_HAND if options.only != "mnist" else ():
        accumulate = ["--accumulate", "2"] if plan.startswith("pipeline") else []
        ours = [*run, "--set", plan, *accumulate, "gpt.py:job"]
        commands[f"gpt {plan}, torchrun"] = [*runner, f"{plan}.py"]
        commands |= {f"gpt {plan}": ours, f"gpt {plan}, --redundancy 0": [*ours, "--redundancy", "0"]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hand.py").write_text(HAND)
        (folder / "ours.py").write_text(OURS)
        (folder / "gpt.py").write_text(GPT_JOB)
        for plan, text in BY_HAND.items():
            step = STAGE_STEP if plan.startswith("pipeline") else PLAIN_STEP
            (folder / f"{plan}.py").write_text(GPT_HAND.format(gpt=GPT, plan=text, step=step))
        seen: dict[str, list[tuple[int, int]]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, words in commands.items():
                seen[name].append(most(words, folder, options.source))
                print(name, seen[name][-1], flush=True)
    kept = RESULTS / "memory_beside.json"
    rows: dict[str, Any] = json.loads(kept.read_text())["measured"] if kept.exists() else {}
    for name, rounds in seen.items():
        whole, largest = (statistics.median(column) for column in zip(*rounds, strict=True))
        rows[name] = {"sum of PSS, MB": whole / 1e6, "largest USS, MB": largest / 1e6, "rounds": rounds}
        for figure in ("sum of PSS, MB", "largest USS, MB"):
            hand = rows[f"{name.split(',')[0]}, torchrun" if name.startswith("gpt") else TORCHRUN]
            rows[name][f"{figure[:-4]}, of torchrun's"] = round(rows[name][figure] / hand[figure], 3)
        print(name, {key: value for key, value in rows[name].items() if key != "rounds"})
    keep("memory_beside", {"goal": "at most 1.05 without redundancy", "measured": rows})


if __name__ == "__main__":
    main()
