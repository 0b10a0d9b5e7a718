"""Experts divided over devices: what they give, their gradients and what is sent; balance losses of the whole batch.

Tests parallel/expert.py, parallel/balance.py, torch_compat/dtensor_operators.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.checker.one_device import one_device
from meshwise.checker.programs import watch_job
from meshwise.checker.proof import prove
from meshwise.checker.trace import CheckSpec
from meshwise.parallel import compiled
from meshwise.parallel.expert import EXPERT, Experts, route
from meshwise.parallel.precision import computing
from meshwise.parallel.technique import Setup
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.training.job.job import Job
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.workers.join import join
from tests.parallel.applied import apply_with, backward
from tests.parallel.test_split_context import ThreadAxis, on_ranks, same

TOKENS, WIDTH, EXPERTS, TOP = 12, 5, 6, 2


class Stacked(nn.Module):
    """As transformers 5 writes them. Under `few` not all experts have tokens."""

    def __init__(self, experts: int = EXPERTS, width: int = WIDTH) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 7, width, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(experts, width, 7, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(experts, width, dtype=torch.float64))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            made = torch.tanh(hidden_states[token] @ self.up[expert].T) @ self.down[expert].T + self.bias[expert]
            out = out.index_add(0, token, made * top_k_weights[token, place, None])
        return out


class ThreadsThatExchange(ThreadAxis):
    """sent: also how many elements went to other ranks."""

    def exchange(self, sent: Any, taken: Any) -> None:
        self.sent["all-to-all"] += sum(rows.numel() for rank, rows in enumerate(sent) if rank != self.rank)
        self.ranks.box[self.rank] = [rows.detach().clone() for rows in sent]
        self.ranks.barrier.wait()
        for rank, rows in enumerate(taken):
            rows.copy_(self.ranks.box[rank][self.rank])
        self.ranks.barrier.wait()


def routed(few: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts and weights of all tokens; with `few` the first two experts have them all."""
    draws = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=draws)
    index = torch.rand(TOKENS, 2 if few else EXPERTS, generator=draws).topk(TOP).indices
    return hidden, index, torch.rand(TOKENS, TOP, dtype=torch.float64, generator=draws)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_divided_experts_give_what_whole_ones_give_and_so_do_their_gradients(size: int, few: bool) -> None:
    whole, (hidden, index, weights) = Stacked(), routed(few)
    seed = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    first, second = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    wanted = whole(first, index, second)
    (wanted * seed).sum().backward()
    own, part = EXPERTS // size, TOKENS // size

    def on_rank(thread: ThreadAxis) -> Any:
        axis = ThreadsThatExchange(thread.ranks, thread.rank)
        mine, rows = Stacked(own), slice(axis.rank * part, (axis.rank + 1) * part)
        for name, p in mine.named_parameters():
            p.data = whole.get_parameter(name).data[axis.rank * own : (axis.rank + 1) * own].clone()
        x, w = hidden[rows].clone().requires_grad_(), weights[rows].clone().requires_grad_()

        def run(*given: Tensor) -> Tensor:
            made = mine(*given)  # without rows it has no gradient by itself where nothing is computed
            return made + sum(p.sum() * 0 for p in mine.parameters()) + given[0].sum() * 0 + given[1].sum() * 0

        out = route(Experts("experts", mine, EXPERTS, axis), run, x, index[rows], w)
        (out * seed[rows]).sum().backward()
        return out.detach(), x.grad, w.grad, [p.grad for p in mine.parameters()], axis.sent["all-to-all"]

    found = on_ranks(size, on_rank)
    assert same(torch.cat([out for out, *_ in found]), wanted.detach())
    assert same(torch.cat([x for _, x, *_ in found]), first.grad) and same(
        torch.cat([f[2] for f in found]), second.grad
    )
    for number, p in enumerate(whole.parameters()):  # of the mean over the ranks
        assert same(torch.cat([f[3][number] for f in found]) * size, p.grad)
    for rank, (*_, sent) in enumerate(found):
        of_tokens = index[rank * part : (rank + 1) * part].flatten() // own
        leave = int((of_tokens != rank).sum())
        come = sum(
            int((index[r * part : (r + 1) * part].flatten() // own == rank).sum()) for r in range(size) if r != rank
        )
        there_and_its_gradient = (WIDTH + 1) * (leave + come)  # a row and its weight; gradients go the other way
        back_and_its_gradient = WIDTH * (come + leave)
        assert sent == there_and_its_gradient + back_and_its_gradient


def test_a_model_without_such_experts_and_a_size_that_does_not_fit_are_refused() -> None:
    def check(model: nn.Module, **axes: int) -> None:
        plan = Plan(**axes)
        assert EXPERT.check_model is not None
        EXPERT.check_model(Setup(model, plan, World(size=plan.devices)))

    with pytest.raises(
        PlanError, match=r"no experts to divide in Sequential\. .* Use data=2 or shard=2, which are exact"
    ):
        check(nn.Sequential(nn.Linear(2, 2)), expert=2)
    with pytest.raises(PlanError, match=r"cannot divide the 6 experts of Stacked evenly. Use expert=2, 3, 6"):
        check(Stacked(), expert=4)
    with pytest.raises(PlanError, match=r"shard=2 with expert=2 divides dim 1 of Stacked.up"):
        check(Stacked(), expert=2, shard=2)
    check(Stacked(), expert=3)


OTHERS = ({"tensor": 2}, {"context": 2}, {"pipeline": 2, "accumulate": 2})


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_not_built_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"expert=2 with \w+=2 is not supported yet. Remove"):
        Plan(expert=2, **other)
    with pytest.raises(PlanError, match=r"expert=2 with zero1=True is not supported. Use shard=2 instead"):
        Plan(expert=2, data=2, zero1=True)
    with pytest.raises(PlanError, match="expert=2 with offload='parameters' is not supported yet"):
        Plan(expert=2, shard=2, offload=("parameters",))


def model_of(kind: str, **more: Any) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 12, "max_position_embeddings": 16, "use_cache": False}
    sizes |= {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
    own = {"num_local_experts": 4}
    if kind != "Mixtral":
        own = {"num_experts": 4, "moe_intermediate_size": 6, "decoder_sparse_step": 1}
    if kind == "Qwen3Moe":
        own["head_dim"] = 4
    config = getattr(transformers, f"{kind}Config")(**sizes, **own, **more)
    return lambda: getattr(transformers, f"{kind}ForCausalLM")(config)


def texts() -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(1, 31, (4 + number % 4,), generator=draws) for number in range(13)]


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def token_mean(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(**batch).loss, (batch["labels"][:, 1:] != -100).sum()


def moe(kind: str = "Mixtral", **more: Any) -> Job:
    """Thirteen texts in batches of six: of a ragged last one, some ranks have none."""
    return Job(
        name=kind,
        model=model_of(kind, **more),
        data=texts,
        collate=padded,
        loss=token_mean,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
        batch_size=6,
        epochs=1,
        clip_norm=0.5,
    )


def hold(job: Job, plan: Plan, pool: Any) -> dict[str, int]:
    """A job under a plan is that of one device; gives how much of each kind was compared."""
    spec = CheckSpec(plan)
    one = one_device(job, spec)
    found = pool(plan.devices).run(watch_job, job, spec, one.draws)[0]
    proof = prove(job.name, spec, f"{plan.devices}xcpu", one, found.trace)
    assert proof.equal, (proof.comparison.first, proof.cause)
    counts = {compared.kind: compared.count for compared in proof.comparison.kinds}
    assert counts["gradients"] and counts["optimizer state"] and counts["gradient norm"]
    return counts


def test_divided_experts_and_a_balance_loss_compute_what_one_device_computes(pool: Any) -> None:
    hold(moe(), Plan(expert=2), pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Qwen2Moe", Plan(expert=2)),
        ("Qwen3Moe", Plan(expert=2, accumulate=2, recompute="full")),
        ("Mixtral", Plan(data=2)),
        ("Mixtral", Plan(shard=2)),
        ("Mixtral", Plan(data=2, zero1=True)),
        ("Mixtral", Plan(tensor=2)),
        ("Mixtral", Plan(data=2, tensor=2)),
        ("Mixtral", Plan(expert=2, recompute="selective", precision="bf16")),
        ("Mixtral", Plan(data=2, expert=2)),
        ("Mixtral", Plan(expert=2, shard=2)),
        ("Qwen3Moe", Plan(expert=4, accumulate=2)),
        ("Mixtral", Plan(expert=2, offload=("optimizer", "activations"))),
    ],
    ids=str,
)
def test_mixtures_of_experts_compute_what_one_device_computes(kind: str, plan: Plan, pool: Any) -> None:
    hold(moe(kind), plan, pool)


class Layers(nn.Module):
    """Its repeated layers are modules of experts themselves, large enough to be gathered one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Stacked(width=64) for _ in range(2))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, index, weights)
        return x


def layered(plan: Plan) -> Tensor:
    world, draws = join().world, torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    model = apply_with(Layers(), plan, world).model if plan.expert > 1 else Layers()
    hidden = torch.randn(TOKENS, 64, dtype=torch.float64, generator=draws)
    weights, index = torch.rand(TOKENS, EXPERTS, dtype=torch.float64, generator=draws).topk(TOP)
    own = [tensor.chunk(plan.expert)[world.rank] for tensor in (hidden, index, weights)]
    return model(*own).detach()


def test_experts_that_are_the_repeated_layers_are_divided_once(pool: Any) -> None:
    (whole,) = pool(1).run(layered, Plan())
    assert torch.allclose(torch.cat(pool(2).run(layered, Plan(expert=2))), whole, atol=1e-12)


def overflowing(plan: Plan) -> list[Any]:
    """Two steps with a loss scaler, of which on the last rank the first overflows: the scale, and whether any and most
    of what this rank holds have changed."""
    world = join().world
    torch.manual_seed(0)
    model = model_of("Mixtral")()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    setup = apply_with(model, plan, world, optimizer)
    scaler, found = torch.amp.GradScaler("cpu", init_scale=2.0**10), list[Any]()
    for number in range(2):
        before = [local_part(p).detach().clone() for p in model.parameters()]
        with computing("cpu", plan.dtypes):
            loss = model(**padded(texts()[world.rank * 3 :][:3])).loss
        spoilt = number == 0 and world.rank == world.size - 1
        backward(setup, scaler.scale(loss * (float("inf") if spoilt else 1.0)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = [not torch.equal(a, local_part(p)) for a, p in zip(before, model.parameters(), strict=True)]
        found.append((scaler.get_scale(), any(changed), sum(changed) > len(changed) / 2))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(expert=2, precision="fp16"), Plan(data=2, expert=2, precision="fp16")], ids=str)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(plan: Plan, pool: Any) -> None:
    for steps in pool(plan.devices).run(overflowing, plan):
        assert steps == [(2.0**9, False, False), (2.0**9, True, True)]


def compiled_step(plan: Plan) -> tuple[list[Tensor], int]:
    """The parameters after a step, and how many graphs were captured."""
    import torch._dynamo.utils

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.BACKEND = "aot_eager"
    world = join().world
    torch.manual_seed(0)
    model = model_of("Mixtral")()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    setup = apply_with(model, plan, world, optimizer)
    part = texts()[:4] * 2  # of the same lengths on both
    loss = model(**padded(part[world.rank * 4 :][:4])).loss
    backward(setup, loss)
    optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach() for p in whole], torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_blocks_are_compiled_around_divided_experts(pool: Any) -> None:
    want, _ = pool(2).run(compiled_step, Plan(data=2))[0]
    for got, graphs in pool(2).run(compiled_step, Plan(expert=2, compile=True)):
        assert graphs
        assert all((a - b).abs().max() < 1e-6 for a, b in zip(got, want, strict=True))


def trained(plan: Plan, folder: Path, resume: Path | None, epochs: int) -> tuple[Any, int]:
    """The facts of a run, and the elements of the model's parameters that this rank holds at the end."""
    held: list[int] = []

    def look(end: Any) -> None:
        held.append(sum(local_part(p).numel() for p in end.model.parameters()))

    job = replace(moe(), epochs=epochs, callbacks=(look,))
    return run_job(job, RunOptions(plan=plan, resume=resume), folder, send=lambda kind, **more: None), held[-1]


def local_part(p: Any) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(pool: Any, tmp_path: Path) -> None:
    weights, held = [], dict[int, int]()
    for name, (first, then) in {"one": (1, 1), "apart": (1, 2), "together": (2, 1), "both": (2, 2)}.items():
        folder = tmp_path / name
        folder.mkdir()
        for size, epochs, resume in ((first, 1, None), (then, 2, folder)):
            results = pool(size).run(trained, Plan(expert=size), folder, resume, epochs)
            assert results[0][0]["status"] == "finished"
            held[size] = results[0][1]
        weights.append(load_file(folder / "weights.safetensors"))
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.allclose(other[name], value, atol=1e-4) for name, value in weights[0].items())
    experts = sum(value.numel() for name, value in weights[0].items() if ".experts." in name)
    assert held[2] < held[1] - experts / 2 + 1
