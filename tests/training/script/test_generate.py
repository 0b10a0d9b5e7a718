"""Greedy `generate` of transformers under shard and tensor: the tokens of one device."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwise as mw
from meshwise.parallel.apply import apply
from meshwise.parallel.precision import compute_in
from meshwise.parallel.splits import rules
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_to_toml
from meshwise.spec.world import World
from meshwise.training.prediction.options import PredictOptions
from meshwise.training.prediction.predict import run_predict, whole
from meshwise.workers.environment import PLAN_FILE

transformers = pytest.importorskip("transformers")


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    ids = {"vocab_size": 61, "eos_token_id": 5, "pad_token_id": 0, "bos_token_id": 1}
    if kind == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=48, max_position_embeddings=64, **heads, **ids
        )
        return transformers.LlamaForCausalLM(config).double().eval()
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **ids)
    return transformers.GPT2LMHeadModel(config).double().eval()


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(6, 61, (4, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padded at the left, as tokenizers do for generation
    return ids, mask


def distribute(model: Any, plan: dict[str, int] | None) -> bool:
    """As a script of `meshwise run --set …` does. Whether there was a plan."""
    if plan:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            Path(folder, "plan.toml").write_text(plan_to_toml(mw.Plan(**plan)))
            patch.setenv(PLAN_FILE, f"{folder}/plan.toml")
            mw.distribute(model, view="rank")
    return bool(plan)


def tokens(kind: str, plan: dict[str, int] | None = None) -> tuple[list[list[int]], dict[str, int]]:
    model = model_of(kind)
    distribute(model, plan)
    rules.gathered.clear()
    ids, mask = prompts()
    found = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    return found.tolist(), dict(rules.gathered)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("axis", ["shard", "tensor"])
def test_greedy_generation_gives_the_tokens_of_one_device(kind: str, axis: str, pool: Any) -> None:
    one, _ = tokens(kind)
    for found, gathered in pool(2).run(tokens, kind, {axis: 2}):
        assert found == one
        assert "cat" not in gathered  # the cache stays divided


@pytest.mark.parametrize("plan", [{"precision": "bf16"}, {"recompute": "full"}, {"offload": ("activations",)}])
def test_a_model_under_a_plan_still_says_what_it_takes(plan: dict[str, Any]) -> None:
    """`generate` gives `position_ids` to a model that takes them: without, padded texts are others, with no error."""
    model = model_of("gpt2").float()
    before = inspect.signature(model.forward)
    apply(model, Plan(**plan), World())
    compute_in(model, Plan(**plan).dtypes, "cpu")
    assert inspect.signature(model.forward) == before
    block = model.transformer.h[0]
    assert inspect.signature(block.forward) == inspect.signature(type(block).forward.__get__(block))


def own_tokens(kind: str, plan: dict[str, int] | None = None) -> list[list[int]]:
    """Each rank generates from prompts of its own, each prompt to a length of its own."""
    model, rows = model_of(kind), range(4)
    if distribute(model, plan):
        rows = range(2 * mw.rank(), 2 * mw.rank() + 2)
    ids, _ = prompts()
    found = []
    for row in rows:
        out = model.generate(ids[row : row + 1], max_new_tokens=3 + 4 * row, do_sample=False)
        found.append(out[0].tolist())
    return found


def test_under_shard_ranks_generate_texts_of_different_lengths(pool: Any) -> None:
    one = own_tokens("llama")
    first, second = pool(2).run(own_tokens, "llama", {"shard": 2})
    assert [*first, *second] == one


def job(kind: str) -> mw.Job:
    ids, mask = prompts()
    return mw.Job(
        name=kind,
        model=lambda: model_of(kind),
        loss=lambda model, batch: model(**batch).logits.mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data={"input_ids": ids, "attention_mask": mask},
        batch_size=3,
        predict=lambda model, batch: model.generate(**batch, max_new_tokens=5, do_sample=False)[:, 7:].tolist(),
    )


def generated(kind: str, plan: dict[str, int]) -> Any:
    return run_predict(job(kind), PredictOptions(job(kind), plan=mw.Plan(**plan)))


@pytest.mark.parametrize("axis", ["shard", "tensor"])
def test_predictions_may_be_generated_texts(axis: str, pool: Any) -> None:
    assert whole(pool(2).run(generated, "llama", {axis: 2})).outputs == whole([generated("llama", {})]).outputs
