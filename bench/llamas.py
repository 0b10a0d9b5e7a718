"""Jobs of Llama 3 as transformers has it, for benches of plans: nothing is downloaded, weights are drawn."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import meshwise as mw

SIZES = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "70b": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
}


class Tokens:
    """A data set of rows of tokens, all zeros."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> Tensor:
        return self.batch([index])[0]

    def batch(self, indices: list[int]) -> Tensor:
        """These rows."""
        return torch.zeros(len(indices), self.length, dtype=torch.int64)


def llama(size: str, batch_size: int, length: int = 4096) -> mw.Job:
    """size: of SIZES."""

    def model() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192}
        settings = LlamaConfig(**SIZES[size], **sizes, tie_word_embeddings=size == "1b", use_cache=False)
        built: nn.Module = LlamaForCausalLM(settings)
        return built

    return mw.Job(
        name=f"llama-3-{size}",
        model=model,
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        data=partial(Tokens, length),
        batch_size=batch_size,
    )


llama_1b = llama("1b", 64)
llama_8b = llama("8b", 64)
llama_70b = llama("70b", 1024)
