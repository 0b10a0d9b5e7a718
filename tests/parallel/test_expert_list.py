"""Experts that are modules of a list, and rows that are sorted by expert: divided over devices, they give what one
device gives.

Tests parallel/expert_list.py, parallel/expert_axis.py, and the layouts of parallel/expert.py.
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

from meshwise.equivalence.one_device import one_device
from meshwise.equivalence.programs import watch_job
from meshwise.equivalence.proof import prove
from meshwise.equivalence.trace import CheckSpec
from meshwise.job.job import Job
from meshwise.job.loop import run_job
from meshwise.job.options import RunOptions
from meshwise.parallel.balance import BALANCE
from meshwise.parallel.expert import EXPERT
from meshwise.parallel.expert_axis import ExpertMeshAxis
from meshwise.parallel.technique import Setup
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from meshwise.workers.join import join
from tests.parallel.applied import apply_with, backward
from tests.parallel.test_experts import moe

WIDTH, EXPERTS = 6, 5


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """As a stranger writes it. skip: an expert without tokens is not called. dense: each has all rows."""

    def __init__(self, skip: bool = True, dense: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.skip, self.dense, self.seen = skip, dense, list[int]()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.forwards += 1
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.dense:
                out += expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)
                continue
            token, place = torch.where(chosen == number)
            if self.skip and len(token) == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return out + torch.tanh(self.shared(x))


class Words(nn.Module):
    def __init__(self, **more: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, WIDTH)
        self.layers = nn.ModuleList(Mixture(**more) for _ in range(2))
        self.head = nn.Linear(WIDTH, 31)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x.flatten(0, 1)).view(x.shape)
        return self.head(x)


def scored(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean over the tokens that count, and how many they are."""
    counts = batch["labels"] != -100
    loss = nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
    return loss, counts.sum()


def words(**more: bool) -> Job:
    """Thirteen texts in batches of six: of a ragged last one, some ranks have none."""
    return replace(moe(), name="words", model=lambda: Words(**more), loss=scored)


def hold(job: Job, plan: Plan, pool: Any) -> None:
    spec = CheckSpec(plan)
    one = one_device(job, spec)
    found = pool(plan.devices).run(watch_job, job, spec, one.draws)[0]
    proof = prove(job.name, spec, f"{plan.devices}xcpu", one, found.trace)
    assert proof.equal, (proof.comparison.first, proof.cause)
    counts = {compared.kind: compared.count for compared in proof.comparison.kinds}
    assert counts["gradients"] and counts["optimizer state"] and counts["gradient norm"]


def test_experts_of_a_list_compute_what_one_device_computes(pool: Any) -> None:
    hold(words(), Plan(expert=2), pool)


def sent_in_a_step() -> tuple[int, list[int], list[int], list[int]]:
    """On a rank: the elements that a forward and a backward have sent to other ranks; how many rows go to each rank's
    experts; how many elements this rank holds of each expert; which experts it calls."""
    world, sent = join().world, list[int]()
    exchange = ExpertMeshAxis.exchange

    def counted(self: ExpertMeshAxis, out: Any, into: Any) -> None:
        sent.append(sum(rows.numel() for rank, rows in enumerate(out) if rank != self.rank))
        exchange(self, out, into)

    ExpertMeshAxis.exchange = counted  # type: ignore[method-assign]
    try:
        torch.manual_seed(0)
        model = Mixture()
        x = torch.randn(8, WIDTH)[world.rank * 4 :][:4].requires_grad_()
        chosen = model.gate(x).softmax(-1).topk(2).indices.flatten()
        setup = apply_with(model, Plan(expert=2), world)
        backward(setup, model(x).square().sum())
    finally:
        ExpertMeshAxis.exchange = exchange  # type: ignore[method-assign]
    owner = chosen * world.size // EXPERTS
    rows = [int((owner == rank).sum()) for rank in range(world.size)]
    called = sorted(set(chosen.tolist()))
    local = [sum(p.to_local().numel() for p in e.parameters() if isinstance(p, DTensor)) for e in model.experts]
    assert model.seen == [4] and float(model.forwards) == 1  # what the first of two runs did is undone
    return sum(sent), rows, local, called


def test_what_is_sent_is_rows_and_parts_of_parameters(pool: Any) -> None:
    found = pool(2).run(sent_in_a_step)
    called = set(found[0][3]) | set(found[1][3])
    whole = sum(p.numel() for p in Expert().parameters())
    for rank, (sent, rows, local, _) in enumerate(found):
        other = 1 - rank
        there_and_back = rows[other] + found[other][1][rank]  # what leaves, and what comes to this rank's experts
        own = [number for number in called if number * 2 // EXPERTS == rank]
        parts = sum(local[number] for number in called - set(own))  # to the rank that runs them
        gradients = sum(whole - local[number] for number in own)  # of what it gave
        assert sent == 2 * WIDTH * there_and_back + parts + gradients
        assert all(abs(2 * held - whole) <= whole // 4 for held in local)


def check(model: nn.Module, **axes: int) -> None:
    plan = Plan(**axes)
    assert EXPERT.check_model is not None
    EXPERT.check_model(Setup(model, plan, World(size=plan.devices)))


def test_experts_that_cannot_be_divided_are_refused() -> None:
    model = Words()
    check(model, expert=5)
    with pytest.raises(PlanError, match=r"layers.0.experts has 5 experts. Use expert=5 or less"):
        check(model, expert=6)
    model.layers[1].experts[2].up = nn.Linear(WIDTH, 7, bias=False)
    with pytest.raises(
        PlanError, match=r"experts of layers.1.experts have parameters of different names or shapes. Use data or shard"
    ):
        check(model, expert=2)
    model.layers[1].experts = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
    with pytest.raises(PlanError, match="have buffers"):
        check(model, expert=2)
    model.layers[1].experts = nn.ModuleList(Expert() for _ in range(2))
    model.layers[1].experts[0].up = model.layers[1].experts[1].up
    with pytest.raises(PlanError, match="share a parameter"):
        check(model, expert=2)


class Chained(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = x + expert(x)
        return x


class InPlace(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return super().forward(x)


class Wider(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x[:, :3]).sum() for expert in self.experts])


def refusal_of(kind: type[nn.Module]) -> str:
    model = kind()
    if kind is Wider:
        model.experts = nn.ModuleList(nn.Linear(3, 4) for _ in range(2))
    setup = apply_with(model, Plan(expert=2), join().world)
    try:
        backward(setup, model(torch.randn(4, WIDTH)).sum())
    except PlanError as error:
        return str(error)
    return ""


def test_a_forward_that_cannot_run_twice_is_refused(pool: Any) -> None:
    said = {Chained: "the input of expert 1 depends on", InPlace: "must not change its inputs", Wider: "returns (8, 4)"}
    for kind, words_of_it in said.items():
        found = pool(2).run(refusal_of, kind)
        assert any(words_of_it in text and "Use data or shard" in text for text in found), found


def trained(plan: Plan, folder: Path, resume: Path | None, epochs: int) -> str:
    job = replace(words(), epochs=epochs)
    facts: Any = run_job(job, RunOptions(plan=plan, resume=resume), folder, send=lambda kind, **more: None)
    return str(facts["status"])


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(pool: Any, tmp_path: Path) -> None:
    weights = []
    for first, then in ((1, 1), (1, 2), (2, 1), (2, 2)):
        folder = tmp_path / f"{first}{then}"
        folder.mkdir()
        for size, epochs, resume in ((first, 1, None), (then, 2, folder)):
            assert set(pool(size).run(trained, Plan(expert=size), folder, resume, epochs)) == {"finished"}
        weights.append(load_file(folder / "weights.safetensors"))
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.allclose(other[name], value, atol=1e-4) for name, value in weights[0].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "plan"),
    [
        ({"skip": False}, Plan(expert=2)),
        ({"dense": True}, Plan(expert=2, accumulate=2)),
        ({}, Plan(expert=2, recompute="full", accumulate=2)),
        ({}, Plan(data=2, expert=2)),
        ({}, Plan(expert=2, shard=2, accumulate=2)),
        ({}, Plan(expert=3)),
    ],
    ids=str,
)
def test_of_every_shape_and_with_other_axes(more: dict[str, bool], plan: Plan, pool: Any) -> None:
    hold(words(**more), plan, pool)


def routed_in_float64(model: nn.Module) -> nn.Module:
    """Its routers cast their own layer, to float32 by the configuration: a no-op in a run, and refused in float64."""
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.dtype = torch.float64
    return model


def switch() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 31, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
    sizes |= {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    sizes |= {"num_experts": 4, "expert_capacity": 64, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = transformers.SwitchTransformersConfig(**sizes)
    return routed_in_float64(transformers.SwitchTransformersForConditionalGeneration(config))


def nllb() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 31, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12}
    sizes |= {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 4, "expert_capacity": 64}
    sizes |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    sizes |= {"moe_token_dropout": 0.0, "max_position_embeddings": 32, "decoder_start_token_id": 0}
    return routed_in_float64(transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**sizes)))


def jetmoe() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "num_key_value_heads": 2}
    sizes |= {"kv_channels": 4, "intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**sizes, max_position_embeddings=16))


def llama4() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "num_key_value_heads": 1}
    sizes |= {"num_attention_heads": 2, "head_dim": 4, "intermediate_size": 12, "intermediate_size_mlp": 12}
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "pad_token_id": 0}
    config = transformers.Llama4TextConfig(**sizes, max_position_embeddings=16, attention_chunk_size=16)
    return transformers.Llama4ForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"switch": switch, "nllb": nllb, "jetmoe": jetmoe, "llama4": llama4}


class Dropping(nn.Module):
    def forward(self, chosen: Tensor, capacity: int = 2) -> Tensor:
        return chosen * (torch.cumsum(chosen, dim=0) <= capacity)


@pytest.mark.parametrize(
    ("make", "plan", "said"),
    [
        (Dropping, Plan(data=2), True),
        (nllb, Plan(shard=2), True),
        (switch, Plan(data=2), False),
        (Dropping, Plan(tensor=2), False),
    ],
)
def test_a_capacity_that_counts_the_tokens_of_a_rank_is_said(
    make: Callable[[], nn.Module], plan: Plan, said: bool
) -> None:
    setup = Setup(nn.ModuleDict({"router": make()}), plan, World(size=2), samples=lambda: 1)
    assert BALANCE.apply is not None
    BALANCE.apply(setup)
    assert (
        any("above an expert's capacity, and counts only the tokens of one rank" in note for note in setup.notes)
        == said
    )


def of_all_labels(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of models that shift the labels themselves."""
    return model(**batch).loss, (batch["labels"] != -100).sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_with_other_layouts(name: str, pool: Any) -> None:
    job = replace(moe(), name=name, model=MODELS[name])
    hold(replace(job, loss=of_all_labels) if name in ("switch", "nllb") else job, Plan(expert=2), pool)
