"""Jobs that train on a processor in milliseconds to a second, for bench/pairs.py and bench/edge.py: the built-in ones,
and models of transformers made small, on random samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from meshwise.training.job.job import Job
from meshwise.training.jobs.registry import find_job

SAMPLES = 4096
SHAPES = {"mnist-mlp": (1, 28, 28), "mnist-cnn": (1, 28, 28), "mlp": (1000,)}
WORDS, TOKENS, IMAGE = 512, 64, 32
TEXT: dict[str, tuple[str, dict[str, int]]] = {
    "bert": ("BertForMaskedLM", {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 192, "n_layer": 3, "n_head": 4, "n_positions": TOKENS}),
    "llama": ("LlamaForCausalLM", {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 128, "num_layers": 2, "num_heads": 4, "d_kv": 32, "d_ff": 256}),
    "opt": ("OPTForCausalLM", {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 768}),
    "neox": ("GPTNeoXForCausalLM", {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}),
    "qwen3": ("Qwen3ForCausalLM", {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 128, "hidden_dim": 512, "n_layers": 3, "n_heads": 4}),
    "electra": ("ElectraForMaskedLM", {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}),
}
MORE = {
    "bert": {"intermediate_size": 512},
    "llama": {"intermediate_size": 640, "num_key_value_heads": 2},
    "opt": {"word_embed_proj_dim": 192, "max_position_embeddings": TOKENS, "dropout": 0.0, "pad_token_id": 0},
    "neox": {"intermediate_size": 768, "max_position_embeddings": TOKENS},
    "qwen3": {"intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64},
    "distilbert": {"dropout": 0.0, "attention_dropout": 0.0},
    "electra": {"intermediate_size": 512, "embedding_size": 128},
}
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": (
        "ViTForImageClassification",
        {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
        | {"image_size": IMAGE, "patch_size": 4},
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "layer_type": "basic"},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"num_stages": 3, "hidden_sizes": [32, 64, 128], "depths": [1, 1, 2], "patch_size": 2},
    ),
}


def job_of(word: str, batch: int) -> Job:
    """A job by its word, with so many samples a step, without a test set; its data are drawn."""
    if word in TEXT or word in IMAGES:
        return replace(_of_transformers(word), batch_size=batch)
    job = replace(find_job(word), test=None, metrics=None, batch_size=batch)
    return replace(job, data=partial(_drawn, SHAPES[word])) if word in SHAPES else job


def _drawn(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, *shape, generator=draw), torch.randint(10, (SAMPLES,), generator=draw)


def _of_transformers(word: str) -> Job:
    name, sizes = (TEXT | IMAGES)[word]
    data: Callable[[], Any] = _tokens if word in TEXT else partial(_drawn, (3, IMAGE, IMAGE))
    return Job(
        name=word,
        model=partial(_model, name, sizes | MORE.get(word, {}) | ({"vocab_size": WORDS} if word in TEXT else {})),
        loss=_text_loss if word in TEXT else _image_loss,
        optimizer=partial(optim.AdamW, lr=1e-3) if word != "resnet" else partial(optim.SGD, lr=0.1, momentum=0.9),
        data=data,
        batch_size=8,
    )


def _model(name: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    dropout = {f"{what}_dropout_prob": 0.0 for what in ("hidden", "attention_probs")}
    more = {"num_labels": 10} if "Image" in name else {}
    if name.startswith("GPT2"):
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    if name.startswith("T5"):
        dropout = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = kind.config_class(**sizes, **dropout, **more)
    model: nn.Module = kind(config)
    return model


def _tokens() -> tuple[Tensor]:
    return (torch.randint(1, WORDS, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0)),)


def _text_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def _image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(pixel_values=batch[0]).logits, batch[1])
