"""Write small models with random weights, tokenizers of words and samples, in place of those of the hub.

scripts.toml names them; each is written into the folder of a script before it starts.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from tests.programs.models import torchvision_ops

WORDS = [f"w{number}" for number in range(60)]
torchvision_ops.complete()
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask", "bos", "eos")}
CHAT = "{% for m in messages %}[BOS]{{ m['role'] }} {{ m['content'] }} [EOS]{% endfor %}"
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def write_tokenizer(at: Path, pairs: bool) -> Any:
    """Of whole words. pairs: with the marks that BERT wants."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    known = {word: number for number, word in enumerate([*SPECIAL.values(), "user", "assistant", *WORDS])}
    inner = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])
    if pairs:
        marks = [(mark, known[mark]) for mark in ("[CLS]", "[SEP]")]
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=64, chat_template=CHAT, **SPECIAL)
    tokenizer.save_pretrained(at)
    return tokenizer


def save_model(at: Path, config: Any, kind: str) -> None:
    """Random weights in float64, and no bias of zero, of which some have no gradient but rounding."""
    import transformers

    torch.manual_seed(11)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = getattr(transformers, kind).from_config(config).double()
        for each in model.parameters():
            if not each.any():
                torch.nn.init.uniform_(each, 0.1, 0.5)
        model.save_pretrained(at)
    finally:
        torch.set_default_dtype(before)


def bert(at: Path, kind: str = "MaskedLM", classes: int = 2, dropout: float = 0.0) -> None:
    """A BERT with a head."""
    from transformers import BertConfig

    tokenizer = write_tokenizer(at / "model", pairs=True)
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "num_labels": classes}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, **SIZES, **drops)
    save_model(at / "model", config, f"AutoModelFor{kind}")


def gpt2(at: Path) -> None:
    """A GPT-2 without dropout."""
    from transformers import GPT2Config

    tokenizer = write_tokenizer(at / "model", pairs=False)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    save_model(at / "model", GPT2Config(vocab_size=len(tokenizer), **sizes, **ids, **QUIET), "AutoModelForCausalLM")


def bart(at: Path) -> None:
    """A BART without dropout."""
    from transformers import BartConfig

    tokenizer = write_tokenizer(at / "model", pairs=True)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0,
             "max_position_embeddings": 64, "decoder_start_token_id": tokenizer.eos_token_id,
             "forced_eos_token_id": tokenizer.eos_token_id}  # fmt: skip
    save_model(at / "model", BartConfig(vocab_size=len(tokenizer), **sizes, **ids), "AutoModelForSeq2SeqLM")


def vit(at: Path) -> None:
    """A ViT for pictures of 32 pixels, and its processor."""
    from transformers import ViTConfig, ViTImageProcessor

    config = ViTConfig(image_size=32, patch_size=8, **SIZES, **STILL)
    save_model(at / "model", config, "AutoModelForImageClassification")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(at / "model")


def sentence(draw: random.Random, longest: int = 14) -> str:
    """Words at random."""
    return " ".join(draw.choices(WORDS, k=draw.randint(3, longest)))


def lines(at: Path, name: str, rows: Iterable[Any]) -> None:
    """A file with a JSON object in each line."""
    at.mkdir(parents=True, exist_ok=True)
    (at / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def splits(write: Callable[[random.Random, int, str], None]) -> None:
    """103 samples to train on, 29 to validate, 23 to test: no batch size divides them."""
    for name, count in (("train", 103), ("validation", 29), ("test", 23)):
        write(random.Random(name), count, name)


def classes(at: Path) -> None:
    """Pairs of sentences and whether they share words; and texts with the class of their first word."""

    def write(draw: random.Random, count: int, name: str) -> None:
        rows = []
        for _ in range(count):
            one, label = sentence(draw), draw.randint(0, 1)
            rows.append({"sentence1": one, "sentence2": one if label else sentence(draw), "label": label})
        lines(at, f"pairs-{name}.json", rows)
        with (at / f"texts-{name}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["text", "label"])
            for text in (sentence(draw) for _ in range(count)):
                out.writerow([text, int(text.split()[0][1:]) % 4])

    splits(write)


def texts(at: Path) -> None:
    """A text for each line."""

    def write(draw: random.Random, count: int, name: str) -> None:
        (at / f"{name}.txt").write_text("".join(sentence(draw) + "\n" for _ in range(count)))

    splits(write)


def tags(at: Path) -> None:
    """Words with their tags."""

    def write(draw: random.Random, count: int, name: str) -> None:
        rows = [sentence(draw).split() for _ in range(count)]
        names = ("O", "B-A", "B-B", "O", "O")
        lines(at, f"{name}.json", ({"tokens": r, "ner_tags": [names[int(w[1:]) % 5] for w in r]} for r in rows))

    splits(write)


def questions(at: Path) -> None:
    """Questions whose answer is a word of a context, as SQuAD has them."""

    def write(draw: random.Random, count: int, name: str) -> None:
        rows = []
        for number in range(count):
            context = sentence(draw, 40)
            word = draw.choice(context.split())
            answers = {"text": [word], "answer_start": [f"{context} ".index(f"{word} ")]}
            rows.append({"id": f"{name}{number}", "context": context, "question": f"{word} w1", "answers": answers})
        (at / f"{name}.json").write_text(json.dumps({"data": rows}))

    splits(write)


def choices(at: Path) -> None:
    """Beginnings with four ends, as SWAG has them."""

    def write(draw: random.Random, count: int, name: str) -> None:
        rows = list[dict[str, Any]]()
        for _ in range(count):
            row = {"sent1": sentence(draw), "sent2": draw.choice(WORDS), "label": draw.randint(0, 3)}
            rows.append(row | {f"ending{number}": sentence(draw) for number in range(4)})
        lines(at, f"{name}.json", rows)

    splits(write)


def translations(at: Path) -> None:
    """Sentences and their backward copies, in the form of two tasks."""

    def write(draw: random.Random, count: int, name: str) -> None:
        found = [sentence(draw, 9) for _ in range(count)]
        pairs = [{"de": text, "en": " ".join(reversed(text.split()))} for text in found]
        lines(at, f"{name}.json", ({"translation": pair} for pair in pairs))
        lines(at, f"summary-{name}.json", ({"text": pair["de"], "summary": pair["en"]} for pair in pairs))

    splits(write)


def chats(at: Path) -> None:
    """Folders as data sets of the hub: conversations, preferences, instructions, texts."""

    def talk(asked: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]

    def write(draw: random.Random, count: int, name: str) -> None:
        file, rows = f"{name}.jsonl", [(sentence(draw), sentence(draw), sentence(draw)) for _ in range(count)]
        lines(at / "chats", file, ({"messages": talk(a, b)} for a, b, _ in rows))
        lines(at / "preferences", file, ({"chosen": talk(a, b), "rejected": talk(a, c)} for a, b, c in rows))
        lines(at / "instructions", file, ({"instruction": a, "output": b} for a, b, _ in rows))
        lines(at / "texts", file, ({"text": b} for _, b, _ in rows))

    def named(draw: random.Random, count: int, name: str) -> None:
        if name != "validation":
            write(draw, count, name)

    splits(named)


def pictures(at: Path) -> None:
    """Folders of pictures, a class each."""
    import numpy
    from PIL import Image

    for word in ("train", "val", "validation"):
        draw = numpy.random.default_rng(len(word))
        for label in range(2):
            place = at / "pictures" / word / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            for number in range(14):
                pixels = draw.integers(0, 120, (40, 40, 3)).astype("uint8")
                pixels[:, :, label % 3] += 100
                Image.fromarray(pixels).save(place / f"{number:03}.png")


def mae(at: Path) -> None:
    """A masked autoencoder, and its processor."""
    from transformers import ViTImageProcessor, ViTMAEConfig

    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
               "decoder_intermediate_size": 24}  # fmt: skip
    config = ViTMAEConfig(image_size=32, patch_size=8, **SIZES, **STILL, **decoder)
    save_model(at / "model", config, "AutoModelForPreTraining")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(at / "model")
