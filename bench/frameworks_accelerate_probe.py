"""What `frameworks.py` puts into scripts of accelerate: small models and data in folders, and what a run leaves.

Imported behind the script's first `import torch`. Of each step the norm of the gradient and the loss, of each epoch the
metrics, and at the end the weights are written to `probe.jsonl` and `weights-N.pt` of the working folder, by rank 0.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torchvision_ops
from torch.optim.optimizer import register_optimizer_step_pre_hook

torchvision_ops.complete()
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE="cache", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
os.environ.update(HF_HUB_DISABLE_PROGRESS_BARS="1")

STOP = "FRAMEWORKS_STOP"
"""Set where a run is to get a Ctrl-C: each step is shown."""
WORDS = [f"word{number}" for number in range(40)]
TRAIN, VALIDATION = 103, 45


def sentence(draw: random.Random, kind: int) -> str:
    """Three to ten words, more of one half of them than of the other."""
    half = WORDS[20 * kind :] if kind else WORDS[:20]
    return " ".join(draw.choice(half if draw.random() < 0.7 else WORDS) for _ in range(draw.randrange(3, 11)))


def write_tokenizer(folder: Path, words: Iterable[str] = WORDS, pair: bool = True) -> int:
    """One that knows these words; gives how many tokens it has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    table = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pair:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    else:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    names = ["input_ids", *(["token_type_ids"] if pair else []), "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        eos_token="[SEP]", model_max_length=64, model_input_names=names,
    ).save_pretrained(folder)  # fmt: skip
    return len(table)


def keep_model(model: Any, folder: Path) -> None:
    """Write it in float64, with biases that are not zero: what has no gradient else has no size to be compared with."""
    torch.manual_seed(0)
    for name, each in model.double().named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(each, std=0.1)
    model.save_pretrained(folder)


def write_pairs(folder: Path, dropout: float = 0.0) -> None:
    """A BERT for two classes, and pairs of sentences in the columns of MRPC."""
    from datasets import Dataset, DatasetDict
    from transformers import BertConfig, BertForSequenceClassification

    draw, tables = random.Random(0), {}
    for split, count in (("train", TRAIN), ("validation", VALIDATION)):
        kinds = [(draw.randrange(2), draw.randrange(2)) for _ in range(count)]
        tables[split] = Dataset.from_dict(
            {
                "sentence1": [sentence(draw, a) for a, _ in kinds],
                "sentence2": [sentence(draw, b) for _, b in kinds],
                "label": [a for a, _ in kinds],
                "idx": list(range(count)),
            }
        )
    DatasetDict(tables).save_to_disk(folder / "mrpc")
    config = BertConfig(
        vocab_size=write_tokenizer(folder / "bert"), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=64, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    keep_model(BertForSequenceClassification(config), folder / "bert")


def write_pairs_with_dropout(folder: Path) -> None:
    """The same with BERT's own dropout."""
    write_pairs(folder, 0.1)


def write_lines(folder: Path) -> None:
    """A GPT-2, and lines of text, some of them empty."""
    from datasets import Dataset, DatasetDict
    from transformers import GPT2Config, GPT2LMHeadModel

    draw = random.Random(0)
    tables = {
        split: Dataset.from_dict({"text": [sentence(draw, n % 2) if n % 5 else "" for n in range(count)]})
        for split, count in (("train", 60), ("validation", VALIDATION))
    }
    DatasetDict(tables).save_to_disk(folder / "wikitext")
    config = GPT2Config(
        vocab_size=write_tokenizer(folder / "gpt2", pair=False), n_embd=16, n_layer=2, n_head=2, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    keep_model(GPT2LMHeadModel(config), folder / "gpt2")


def write_phrases(folder: Path) -> None:
    """A BART, and phrases with a word for what they feel, as lines of JSON."""
    from transformers import BartConfig, BartForConditionalGeneration

    draw, feelings = random.Random(0), ["negative", "neutral", "very positive"]
    place = folder / "temp" / "data" / "FinancialPhraseBank-v1.0"
    place.mkdir(parents=True)
    for split, count in (("train", TRAIN), ("val", VALIDATION)):
        rows = [(draw.randrange(3), draw.randrange(2)) for _ in range(count)]
        lines = [json.dumps({"sentence": sentence(draw, b), "label": feelings[a]}) for a, b in rows]
        (place / f"financial_phrase_bank_{split}.jsonl").write_text("\n".join(lines) + "\n")
    words = [*WORDS, *(word for each in feelings for word in each.split())]
    config = BartConfig(
        vocab_size=write_tokenizer(folder / "bart", words, pair=False), d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, init_std=0.2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=3,
        forced_eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    keep_model(BartForConditionalGeneration(config), folder / "bart")


def write_products(folder: Path) -> None:
    """A BERT, and queries with products that answer them or do not."""
    from datasets import Dataset, DatasetDict

    write_pairs(folder)
    draw, tables = random.Random(1), {}
    for split, count in (("train", TRAIN), ("validation", VALIDATION)):
        kinds = [(draw.randrange(2), draw.randrange(2)) for _ in range(count)]
        tables[split] = Dataset.from_dict(
            {
                "query": [sentence(draw, a) for a, _ in kinds],
                "product_title": [sentence(draw, b) for _, b in kinds],
                "relevance_label": [int(a == b) for a, b in kinds],
            }
        )
    DatasetDict(tables).save_to_disk(folder / "esci")


def write_pets(folder: Path) -> None:
    """Pictures whose names say what they show."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    (folder / "pets").mkdir()
    for number in range(60):
        kind = number % 3
        pixels = draw.integers(0, 120, (80, 80, 3)).astype("uint8")
        pixels[:, :, kind] += 100
        Image.fromarray(pixels).save(folder / "pets" / f"{('cat', 'dog', 'owl')[kind]}_{number}.jpg")


class Metric:
    """Accuracy and F1 as `evaluate` has them for MRPC; the area under the curve for scores."""

    def __init__(self) -> None:
        self.shown: list[float] = []
        self.right: list[int] = []

    def add_batch(self, references: Any, predictions: Any = None, prediction_scores: Any = None) -> None:
        self.shown += (predictions if prediction_scores is None else prediction_scores).tolist()
        self.right += references.tolist()

    def compute(self, predictions: Any = None, references: Any = None) -> dict[str, float]:
        if predictions is not None:
            self.add_batch(references, predictions)
        both = list(zip(self.shown, self.right, strict=True))
        self.shown, self.right = [], []
        if any(isinstance(shown, float) for shown, _ in both):
            good, bad = ([shown for shown, right in both if right == kind] for kind in (1, 0))
            wins = sum((a > b) + (a == b) / 2 for a in good for b in bad)
            return {"roc_auc": wins / (len(good) * len(bad))}
        hits = sum(shown == right == 1 for shown, right in both)
        named = sum(shown == 1 for shown, _ in both) + sum(right == 1 for _, right in both)
        right = sum(shown == right for shown, right in both)
        return {"accuracy": right / len(both), "f1": 2 * hits / named, "samples": float(len(both))}


def first() -> bool:
    """Whether this is rank 0, or the only process."""
    return "meshwise" not in sys.modules or sys.modules["meshwise"].rank() == 0


def tell(**what: Any) -> None:
    """Write a line, of rank 0."""
    if first():
        with Path("probe.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")


def weights(model: torch.nn.Module) -> None:
    """Keep them, and what the model else has in its state."""
    if first():
        torch.save(model.state_dict(), f"weights-{len(list(Path().glob('weights-*.pt')))}.pt")


def begin(package: str) -> None:
    """Look at each step of an optimizer; compute in float64 what transformers casts to float32."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign, assignment]
    steps = 0

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal steps
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        squares = [each.grad.double().square().sum() for each in parameters if each.grad is not None]
        tell(norm=float(torch.stack(squares).sum().sqrt()))
        steps += 1
        if STOP in os.environ and first():
            print(f"\nloss {steps}", flush=True)

    register_optimizer_step_pre_hook(look)
