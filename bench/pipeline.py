"""A pipeline against PyTorch written by hand, and against the theory of its schedules.

    python bench/pipeline.py [--steps 60]

By hand: `torch.distributed.pipelining` with its stages cut out of the model and Schedule1F1B. Of a steady step the
operators that reach the dispatcher and the sends and receives with their bytes are counted on each rank; time is a
ratio, of two ranks on two cores. Theory: a stage s of p keeps min(m, p - s) of m microbatches under 1F1B and all under
GPipe, and the bubble of equal stages is (p - 1) / (v m + p - 1) with v stages a rank (Narayanan and others, SC 2021).
The bubble of a run is that of its report, and has the noise of the machine in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from by_hand import Transformer, counted, summary  # beside this script
from keep import keep
from overhead import compare
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import meshwise as mw
from meshwise.data.order import epoch_slices
from meshwise.job.run import begun, make_engine, open_data, read_parts
from meshwise.job.step import train_step
from meshwise.parallel.schedule import CHUNKS
from meshwise.workers.join import join

WORDS, ROWS, LENGTH, WARM = 256, 8, 16, 3
Step = Callable[[], None]


def untied(width: int, layers: int) -> nn.Module:
    """The transformer of `by_hand.py`, with a head of its own."""
    model = Transformer(width, layers, WORDS)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def tokens(length: int) -> Tensor:
    """The batch of every step."""
    return torch.randint(WORDS, (ROWS, length), generator=torch.Generator().manual_seed(1))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of both sides."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def job_of(width: int, layers: int, length: int, rows: int = ROWS) -> mw.Job:
    """Our side: one job, whatever the plan."""
    return mw.Job(
        name="pipeline",
        model=lambda: untied(width, layers),
        data=lambda: tokens(length).repeat(rows // ROWS, 1),
        loss=lambda model, batch: token_loss(model(batch), batch),
        optimizer=adam,
        batch_size=ROWS,
        clip_norm=1.0,
    )


def our_step(plan: mw.Plan, width: int, layers: int, length: int) -> Step:
    """A step of the job under a plan, on this rank."""
    job = job_of(width, layers, length)
    engine = make_engine(join(), plan)
    state = begun(job, plan, engine)
    data = open_data(job, job.data(), "training set")
    (shares,) = epoch_slices(torch.arange(ROWS), ROWS, engine.world, plan.accumulate)
    state.model.train()

    def step() -> None:
        train_step(engine, job, state, list(read_parts(data, shares, 0, engine.world.device)))

    return step


class OneStage(nn.Module):
    """A stage that is cut out by hand: its layers, with the embedding before the first and the head behind the last."""

    def __init__(self, whole: Any, rank: int, ranks: int) -> None:
        super().__init__()
        each = len(whole.layers) // ranks
        self.layers = nn.ModuleList(whole.layers[rank * each : (rank + 1) * each])
        self.embed = whole.embed if rank == 0 else None
        self.norm, self.head = (whole.norm, whole.head) if rank == ranks - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def hand_step(plan: mw.Plan, width: int, layers: int, length: int) -> Step:
    """The same with torch's pipelining: its stages, its schedule, and a clip norm over both."""
    rank, ranks = torch.distributed.get_rank(), plan.pipeline
    torch.manual_seed(0)
    own = OneStage(untied(width, layers), rank, ranks)
    batch = tokens(length)
    stage = PipelineStage(own, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, plan.accumulate, loss_fn=token_loss, scale_grads=True)
    optimizer = adam(own.parameters())

    def step() -> None:
        given = (batch,) if rank == 0 else ()
        schedule.step(*given, **({"target": batch, "losses": []} if rank == ranks - 1 else {}))
        squares = torch.nn.utils.get_total_norm([p.grad for p in own.parameters() if p.grad is not None]).square()
        torch.distributed.all_reduce(squares)
        torch.nn.utils.clip_grads_with_norm_(own.parameters(), 1.0, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad()

    return step


def counts(plan: mw.Plan) -> dict[str, Any]:
    """What a steady step of each side runs, on this rank."""
    found = {}
    for name, make in (("ours", our_step), ("by hand", hand_step)):
        step = make(plan, 64, 4, LENGTH)
        for _ in range(WARM):
            step()
        found[name] = counted(step)
    return found


def times(plan: mw.Plan, steps: int) -> dict[str, Any]:
    """Interleaved times of both sides."""
    return compare(our_step(plan, 256, 4, 64), hand_step(plan, 256, 4, 64), steps)


class Kept:
    """Counts the bytes of what autograd keeps for the backward beside parameters: now, and at most."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.bytes = self.most = 0

    def pack(self, tensor: Tensor) -> Any:
        """What is kept in its place."""
        if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        holders = self.storages[place] = self.storages.get(place, 0) + 1
        self.bytes += storage.nbytes() if holders == 1 else 0
        self.most = max(self.most, self.bytes)
        return _Holder(self, tensor, place)

    def let_go(self, place: int, size: int) -> None:
        """One holder less."""
        self.storages[place] -= 1
        if not self.storages[place]:
            del self.storages[place]
            self.bytes -= size


class _Holder:
    def __init__(self, kept: Kept, tensor: Tensor, place: int) -> None:
        self.kept, self.tensor, self.place = kept, tensor, place

    def __del__(self) -> None:
        self.kept.let_go(self.place, self.tensor.untyped_storage().nbytes())


def memory(plan: mw.Plan) -> int:
    """Bytes of what the backward needs at most in a step on this rank, beside parameters."""
    step = our_step(plan, 64, 8, LENGTH * 4)
    for _ in range(WARM):
        step()
    kept = Kept()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: getattr(held, "tensor", held)):
        step()
    return kept.most


def bubbles(schedule: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """The bubble of a run of 12 steps, from its report."""
    plan = mw.Plan(pipeline=ranks, accumulate=microbatches, schedule=schedule)
    job = job_of(256, 8, 64, ROWS * 12)
    job = replace(job, batch_size=ROWS, epochs=1)
    run = mw.run(job, devices=f"{ranks}xcpu", plan=plan)
    pipeline = mw.report(run.folder).pipeline
    assert pipeline is not None
    chunks = CHUNKS.get(schedule, 1)
    return {
        "measured": round(pipeline.bubble, 3),
        "with these stages": round(pipeline.bubble_of_stages, 3),
        "with equal stages": round(pipeline.bubble_of_schedule, 3),
        "theory": round((ranks - 1) / (chunks * microbatches + ranks - 1), 3),
    }


def main() -> None:
    """Count, measure, print, keep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60, help="that are timed; 0 counts alone")
    steps = parser.parse_args().steps
    plan = mw.Plan(pipeline=2, accumulate=4)
    ranks = [summary(found) for found in mw.launch(counts, plan, devices="2xcpu")]
    result: dict[str, Any] = {"claims": ["at most 5 % more operators"], "against torch's Schedule1F1B": ranks}
    for rank in ranks:
        print({name: value for name, value in rank.items() if name != "difference by operator"}, flush=True)
    kept: dict[str, Any] = {}
    for schedule in ("1f1b", "gpipe"):
        each = mw.Plan(pipeline=4, accumulate=8, schedule=schedule)
        kept[schedule] = mw.launch(memory, each, devices="4xcpu")
        print(schedule, kept[schedule], flush=True)
    shares = [round(own / whole, 3) for own, whole in zip(kept["1f1b"], kept["gpipe"], strict=True)]
    kept |= {"1f1b of gpipe": shares, "theory": [min(8, 4 - stage) / 8 for stage in range(4)]}
    result["bytes kept for the backward, pipeline=4, 8 microbatches"] = kept
    print(shares, flush=True)
    if steps:
        result["time"] = mw.launch(times, plan, steps, devices="2xcpu")[0]
        print(result["time"], flush=True)
        result["bubble"] = {}
        for schedule in ("1f1b", "gpipe", "interleaved"):
            for microbatches in (2, 4, 8):
                found = bubbles(schedule, 2, microbatches)
                result["bubble"][f"{schedule}, 2 ranks, {microbatches} microbatches"] = found
                print(schedule, microbatches, found, flush=True)
    keep("pipeline", result)


if __name__ == "__main__":
    main()
