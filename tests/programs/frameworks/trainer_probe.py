"""Notes what a run of a script with transformers' Trainer leaves, and has metrics of the hub.

Of each optimizer step the norm of the gradient, and whatever the Trainer logs but times, and the weights at the end of
training, are written to `probe.jsonl` and `weights-N.pt` of the working folder, by rank 0.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torchvision_ops

UNLIKE = ("runtime", "per_second", "_time", "total_flos", "num_input_tokens_seen", "memory", "_mem_")
"""Times, and what was computed: a rank pads to the longest of its own rows (docs/trainer.md)."""
WIDE = ("transformers.trainer_pt_utils", "trl.kernels.chunked_logprob")
"""What adds up in float32 whatever its model is in: label smoothing, and the head of TRL."""
FLOAT32 = ("loss", "train_loss")
"""What Trainer adds up in float32."""


def numbers(found: dict[str, Any]) -> dict[str, float]:
    """Those that two runs share."""
    found = {name: x for name, x in sorted(found.items()) if isinstance(x, int | float)}
    return {
        f"{name}, float32" if name in FLOAT32 else name: float(x)
        for name, x in found.items()
        if not any(word in name for word in UNLIKE)
    }


def tell(**what: Any) -> None:
    """Write a line."""
    with Path("probe.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def begin(package: str) -> None:
    """Look at each Trainer; compute in float64 what transformers casts to float32."""
    torchvision_ops.complete()
    numpy.random.seed(0)  # which `datasets` splits by
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=str(Path("cache").resolve()), TOKENIZERS_PARALLELISM="false")
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign, assignment]
    import transformers

    whole, log_metrics = transformers.Trainer.train, transformers.Trainer.log_metrics

    def train(self: Any, *args: Any, **options: Any) -> Any:
        if not any(type(each).__name__ == "Probe" for each in self.callback_handler.callbacks):
            self.add_callback(_probe(transformers))
        return whole(self, *args, **options)

    def told(self: Any, split: str, metrics: dict[str, Any]) -> None:
        if self.is_world_process_zero():
            tell(step=self.state.global_step, split={split: float(len(metrics))}, metrics=numbers(metrics))
        log_metrics(self, split, metrics)

    for name in WIDE:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name).torch = _Double()  # type: ignore[attr-defined]
    transformers.Trainer.train, transformers.Trainer.log_metrics = train, told


class _Double:
    """torch, in which float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _probe(transformers: Any) -> Any:
    class Probe(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
                tell(step=state.global_step, norm=float(torch.stack(squares).sum().sqrt()))

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if state.is_world_process_zero:
                tell(step=state.global_step, log=numbers(logs))

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                number = len(list(Path().glob("weights-*.pt")))
                torch.save(model.state_dict(), f"weights-{number}.pt")

    return Probe()


# In place of `evaluate` and `nltk`.


class Words:
    """Sentences of nltk: a text is one."""

    data = SimpleNamespace(find=lambda name: name)

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]


def load(name: str, *_: Any, **__: Any) -> Any:
    """A metric of the hub, which is not asked."""
    return SimpleNamespace(compute=globals()[f"_{name}"])


def _accuracy(predictions: Any, references: Any, **_: Any) -> dict[str, float]:
    pairs = list(zip(predictions, references, strict=True))
    return {"accuracy": sum(int(a) == int(b) for a, b in pairs) / len(pairs)}


def _glue(predictions: Any, references: Any) -> dict[str, float]:
    return _accuracy(predictions, references)


def _seqeval(predictions: Any, references: Any) -> dict[str, Any]:
    """Of tags one by one, which are words of their own here."""
    pairs = [pair for a, b in zip(predictions, references, strict=True) for pair in zip(a, b, strict=True)]
    right = sum(a == b != "O" for a, b in pairs)
    precision = right / max(sum(a != "O" for a, _ in pairs), 1)
    recall = right / max(sum(b != "O" for _, b in pairs), 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-12)
    accuracy = sum(a == b for a, b in pairs) / len(pairs)
    return {f"overall_{name}": x for name, x in
            {"precision": precision, "recall": recall, "f1": f1, "accuracy": accuracy}.items()}  # fmt: skip


def _squad(predictions: Any, references: Any) -> dict[str, float]:
    known = {each["id"]: each["answers"]["text"] for each in references}
    right = sum(each["prediction_text"] in known[each["id"]] for each in predictions)
    return {
        "exact_match": 100 * right / len(predictions),
        "f1": float(sum(len(p["prediction_text"]) for p in predictions)),
    }


def _shared(predictions: Any, references: Any, **_: Any) -> dict[str, float]:
    """The share of words at their place, and how many were written."""
    pairs = [(str(a).split(), str(b[0] if isinstance(b, list) else b).split())
             for a, b in zip(predictions, references, strict=True)]  # fmt: skip
    right = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    return {"rouge1": right / len(pairs), "score": float(sum(len(a) for a, _ in pairs))}


_rouge = _sacrebleu = _shared
