"""Rows that are sorted by expert give on several devices what one device gives; experts of a list are refused.

Tests parallel/expert.py, the layouts of parallel/expert.py, and the capacities of parallel/balance.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwise.parallel.balance import BALANCE
from meshwise.parallel.expert import EXPERT
from meshwise.parallel.technique import Setup
from meshwise.spec.errors import PlanError
from meshwise.spec.plan import Plan
from meshwise.spec.world import World
from tests.parallel.test_experts import hold, moe


class Listed(nn.Module):
    """As a stranger writes it: experts are modules of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 5)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))


def test_experts_of_a_list_are_refused() -> None:
    assert EXPERT.check_model is not None
    with pytest.raises(
        PlanError,
        match=r"cannot divide 1\.experts, whose experts are modules of a list.* use data=2 or shard=2",
    ):
        EXPERT.check_model(Setup(nn.Sequential(nn.Linear(6, 6), Listed()), Plan(expert=2), World(size=2)))


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


MODELS: dict[str, Callable[[], nn.Module]] = {"jetmoe": jetmoe, "llama4": llama4}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_with_other_layouts(name: str, pool: Any) -> None:
    hold(replace(moe(), name=name, model=MODELS[name]), Plan(expert=2), pool)
