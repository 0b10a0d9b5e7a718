"""Trains published models, made tiny, by the whole view's one line and by the untouched loop.

    PYTHONPATH=src:FOLDER python bench/whole_models.py [--only WORD ...] [--ranks 2 3] [--rows 6 7] [--again STATUS ...]

FOLDER holds timm, torchvision and the packages of tests/programs/models/foreign_table.py. Every model trains for two
batches of a DataLoader, in float64, with SGD and without dropout: untouched on one device, twice the same, and on ranks
with `mw.distribute(model, optimizer, loader, view="whole")` added. Losses and what the model holds must be within 1e-9
of the untouched loop's, or 1e-6 where a float32 tensor with a gradient was seen in it. What has a result is not run
again, unless `--again` names its status. With `--ranks` alone, only the untouched loops run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs" / "models"))
sys.path.insert(0, str(Path(__file__).parent))
import foreign_losses as losses
import foreign_table
import tiny_models
from breadth import REFUSALS, commit
from foreign_table import labelled, rows, texts
from keep import RESULTS, keep

import meshwise as mw
from tests.pool import CaseFailed, Pool

Batch, Make, Loss = dict[str, Tensor], Callable[[], nn.Module], Callable[[Any, Any], Any]
Model = tuple[Make, Callable[[], Batch], Loss]  # a loss may be a tuple, whose first counts
Run = tuple[list[float], Batch, list[tuple[str, str, str]]]  # losses, state in the end, (class, how, why) of calls
LIMIT, LIMIT_OF_FLOAT32, SECONDS = 1e-9, 1e-6, 120
WORST = ("does not run", "differs", "wrong", "failed", "timeout", "refused", "equal", "runs")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
torch.set_num_threads(1)


def outside(model: Any, batch: Batch, task: str = "") -> Any:
    """The loss of a loop over a model of transformers."""
    labels = batch.pop("labels")
    if task == "seq2seq":
        batch["decoder_input_ids"], labels = labels[:, :-1].clamp(min=0), labels[:, 1:]
    logits = model(**batch).logits
    if task == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1))


def tiny(name: str) -> Model:
    """An architecture of tiny_models: `NAME+own` by its own loss, `NAME-mask` without a mask of attention."""
    base, _, own = name.removesuffix("-mask").partition("+")
    task = tiny_models.architectures()[base][0]

    def data() -> Batch:
        found = tiny_models.data_of(base)
        found = found if isinstance(found, dict) else dict(zip("xy", found, strict=True))
        return {k: v for k, v in found.items() if not (name.endswith("-mask") and k == "attention_mask")}

    loss = losses.classified if task in ("timm", "torchvision") else partial(outside, task=task)
    return partial(tiny_models.model_of, base), data, INSIDE if own or task in ("ctc", "speech") else loss


def published(name: str, loss: Loss, data: Callable[[], Batch], **more: Any) -> Model:
    """A class of transformers that tiny_models has no task for."""
    made = getattr(transformers, name)
    return lambda: made(tiny_models.config_of(made.config_class, made.config_class.model_type, **more)), data, loss


class Net(nn.Module):
    """Layers, and a forward of them and the inputs."""

    def __init__(self, run: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.run, self.layers = run, nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(*self.layers, *inputs)


def net(loss: Loss, data: Callable[[], Batch], run: Callable[..., Any], *layers: Make) -> Model:
    """A model of a few layers, by its forward."""
    return lambda: Net(run, *(make() for make in layers)), data, loss


def several(**shapes: tuple[int, ...]) -> Callable[[], Batch]:
    """Numbers in these shapes."""
    return lambda: {k: torch.arange(24.0 * math.prod(s)).mul(len(k)).sin().view(24, *s) for k, s in shapes.items()}


def _packed(embed: Any, rnn: Any, out: Any, tokens: Tensor) -> Any:
    sizes = (tokens != 0).sum(1).cpu()
    packed = nn.utils.rnn.pack_padded_sequence(embed(tokens), sizes, batch_first=True, enforce_sorted=False)
    return out(rnn(packed)[1][0].transpose(0, 1).flatten(1))


def _word_lm(embed: Any, rnn: Any, out: Any, tokens: Tensor) -> Any:
    state = embed.weight.new_zeros(1, tokens.size(0), 16)
    return out(rnn(embed(tokens.t()), (state, state))[0]).transpose(0, 1)


def _translator(embed: Any, body: Any, out: Any, tokens: Tensor) -> Any:
    source, mask = tokens.flip(1), nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
    return out(body(embed(source), embed(tokens), tgt_mask=mask, src_key_padding_mask=source == 0))


def _dlrm(embed: Any, bottom: Any, top: Any, kinds: Tensor, x: Tensor) -> Any:
    parts = torch.cat([bottom(x).unsqueeze(1), embed(kinds)], 1)
    i, j = torch.tril_indices(5, 5, -1)
    return top(torch.cat([parts[:, 0], torch.bmm(parts, parts.transpose(1, 2))[:, i, j]], 1))


def _experts(gate: Any, experts: Any, out: Any, x: Tensor) -> Any:
    weights, chosen = gate(x).softmax(1).topk(2)
    found = torch.zeros_like(x)
    for n, expert in enumerate(experts):
        which, place = torch.where(chosen == n)
        found = found.index_add(0, which, weights[which, place, None] * expert(x[which]))
    share = F.one_hot(chosen, 4).to(x.dtype).mean((0, 1))
    return out(found), (share * gate(x).softmax(1).mean(0)).sum()


def _chain(*layers: Make) -> tuple[Callable[..., Any], Make]:
    return lambda f, x: f(x), lambda: nn.Sequential(*(make() for make in layers))


L, E, UP = (partial(partial, kind) for kind in (nn.Linear, nn.Embedding, nn.ConvTranspose2d))
EMBED, WORD, FIVE, NORM = E(64, 16), L(16, 64), L(16, 5), partial(nn.BatchNorm1d, 16)
LSTM, GRU = partial(nn.LSTM, 16, 16), partial(nn.GRU, 16, 16, batch_first=True)
SEQ2SEQ = partial(nn.Transformer, 16, 4, 1, 1, 32, 0.0, batch_first=True)
DCGAN = _chain(UP(8, 8, 4), partial(nn.BatchNorm2d, 8), nn.ReLU, UP(8, 3, 4, 2, 1), nn.Tanh)
T, NEXT, CLASS = texts(), losses.next_token, losses.classified
INSIDE, SAID, FIT, HIDDEN, OF_BOTH, SENTENCE = (
    lambda m, b: m(**b).loss,
    lambda m, b: F.cross_entropy(m(b["tokens"]), b["tokens"].sum(1) % 5),
    lambda m, b: F.mse_loss(m(b["x"]), b["y"]),
    lambda m, b: m(b["y"]).loss,
    lambda m, b: m(b["x"], b["y"], return_loss=True).loss,
    lambda m, b: F.cross_entropy(m(b["x"]).logits, b["x"].sum(1) % 2),
)
PATCHES = {"num_input_channels": 2, "prediction_length": 4, "patch_length": 4, "patch_stride": 4, "context_length": 16}
FUTURE = several(past_values=(16, 2), future_values=(4, 2))
PAIRS = {"x": tiny_models.data_of("BertForMaskedLM")["input_ids"], "y": several(x=(3, 32, 32))()["x"]}
MODELS: dict[str, Model] = {
    "LSTM": net(SAID, T, lambda e, r, o, x: o(r(e(x))[0].amax(1)), EMBED, partial(LSTM, batch_first=True), FIVE),
    "GRU": net(SAID, T, lambda e, r, o, x: o(r(e(x))[1][-1]), EMBED, GRU, FIVE),
    "packed BiLSTM": net(SAID, T, _packed, EMBED, partial(LSTM, bidirectional=True), L(32, 5)),
    "word LM, time first": net(NEXT, T, _word_lm, EMBED, LSTM, WORD),
    "nn.Transformer": net(NEXT, T, _translator, EMBED, SEQ2SEQ, WORD),
    "TextCNN": net(SAID, T, lambda e, c, o, x: o(c(e(x).mT).amax(2)), EMBED, partial(nn.Conv1d, 16, 16, 3), FIVE),
    "DLRM": net(losses.tabular, rows, _dlrm, E(10, 8), L(6, 8), L(18, 1)),
    "PointNet": net(CLASS, labelled(20, 3), lambda f, n, o, x: o(n(f(x).mT).amax(2)), L(3, 16), NORM, FIVE),
    "GCN, dense": net(CLASS, labelled(7, 7), lambda f, o, x: o(x.softmax(2) @ f(x)).mean(1), L(7, 16), FIVE),
    "experts": net(losses.tabnet, labelled(16), _experts, L(16, 4), _chain(*[L(16, 16)] * 4)[1], FIVE),
    "DCGAN": net(FIT, several(x=(8, 1, 1), y=(3, 8, 8)), *DCGAN),
    "PatchTST": published("PatchTSTForPrediction", INSIDE, FUTURE, **PATCHES),
    "CLIPModel": published("CLIPModel", OF_BOTH, lambda: PAIRS),
    "ViTMAE": published("ViTMAEForPreTraining", HIDDEN, lambda: PAIRS),
    "BertForSequenceClassification": published("BertForSequenceClassification", SENTENCE, lambda: PAIRS),
}
NAMES = """
Bert Bert-mask Bert+own Roberta DistilBert Electra Albert DebertaV2 MobileBert SqueezeBert ConvBert Ernie Camembert
FNet Nystromformer Longformer-mask BigBird Funnel MPNet ModernBert Esm XLMRoberta RoFormer Deberta | ForMaskedLM
GPTNeo GPTNeoX GPTJ Llama Llama-mask Llama+own Mistral Mixtral Qwen2 Qwen3 Qwen3Moe Gemma Gemma2-mask Gemma3 Phi Phi3
OPT Bloom Falcon Mpt DeepseekV3 GptOss Olmo2 StableLm Cohere Mamba Mamba2 Rwkv BioGpt | ForCausalLM
GPT2 GPT2-mask GPT2+own XLNet CTRL Bert OpenAIGPT | LMHeadModel
T5 T5+own MT5 Bart+own MBart+own Pegasus M2M100 Blenderbot ProphetNet+own LED-mask SwitchTransformers Whisper
Speech2Text | ForConditionalGeneration
ViT DeiT Beit Swin Swinv2 ConvNext ConvNextV2 ResNet RegNet MobileNetV1 MobileNetV2 EfficientNet PoolFormer Segformer
Dinov2 Levit CLIP Siglip MobileViT Pvt FocalNet Hiera Bit | ForImageClassification
Marian | MTModel  Wav2Vec2 Hubert WavLM | ForCTC  Wav2Vec2 | ForSequenceClassification
AST | ForAudioClassification  VideoMAE | ForVideoClassification
"""
"""Beginnings of classes of transformers | their end."""
for words, end in re.findall(r"([^|]+)\|\s*(\S+)", NAMES):
    MODELS |= {n: tiny(n) for n in (re.sub(r"(?=[+-]|$)", end, word, count=1) for word in words.split())}
MODELS |= {n: tiny(n) for n in tiny_models.architectures() if n.startswith(("timm.", "torchvision."))}
for known, model in foreign_table.MODELS.items():
    if not (model.join or model.apart or model.loss is losses.batch_dice) and foreign_table.version_of(model):
        MODELS[known] = partial(foreign_table.model_of, known), model.data, model.loss


class Casts(TorchFunctionMode):
    """Sees whether a float32 tensor has a gradient."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.seen |= isinstance(out, Tensor) and out.dtype == torch.float32 and out.requires_grad
        return out


def train(name: str, size: int, line: bool = False, seed: int = 1) -> Run:
    """The loop over batches of a size. line: whether it has the one line."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    make, data, loss_of = MODELS[name]
    model = make().double().train()
    getattr(model, "set_experts_implementation", str)("eager")  # torch's product of groups is not for float64
    for module in model.modules():
        for key, value in [*vars(module).items()]:
            if isinstance(value, float) and ("drop" in key or (key == "p" and "D" in type(module).__name__)):
                setattr(module, key, 0.0)
    held = {k: v.double() if v.is_floating_point() else v for k, v in data().items()}
    samples: Any = [{k: v[n] for k, v in held.items()} for n in range(2 * size)]
    optimizer, loader = torch.optim.SGD(model.parameters(), 0.05), DataLoader(samples, size)
    if line:
        model, optimizer, loader = mw.distribute(model, optimizer, loader, view="whole")  # type: ignore[call-overload]
    torch.manual_seed(seed)
    found = []
    for batch in loader:
        loss = loss_of(model, batch)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    held = {k: v.detach().clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    known = [(m, v) for m in model.modules() for v in getattr(m.forward, "known", {}).values()]
    return found, held, [(type(m).__name__, "through" if v.dims is None else "apart", v.why) for m, v in known]


def far(a: Run, b: Run) -> float:
    """The largest absolute difference of two runs, infinite where a number is none."""
    pairs = [(torch.tensor(a[0]), torch.tensor(b[0])), *((a[1][key], b[1][key]) for key in a[1])]
    found = [float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel()]
    return max(x if x < float("inf") else float("inf") for x in found)


def untouched(name: str, size: int) -> tuple[Run | None, dict[str, Any]]:
    """What the loop does as it is, and what is known of it."""
    began = time.perf_counter()
    try:
        with Casts() as casts:
            want = train(name, size)
        apart, draws = far(want, train(name, size)), far(want, train(name, size, seed=2)) > 0
    except Exception as error:  # whatever a model of others raises
        return None, {"status": "does not run", "text": f"{type(error).__name__}: {error}"[:300]}
    about = {"apart": apart, "float32": casts.seen, "draws": draws, "seconds": time.perf_counter() - began}
    return want if apart == 0 else None, {"status": "differs" if apart else "runs"} | about


def on_ranks(folder: str, name: str, size: int) -> Run:
    """On a worker: the loop with the one line."""
    sys.path.insert(0, folder)
    return importlib.import_module("whole_models").train(name, size, line=True)  # type: ignore[no-any-return]


def held_against(want: Run, limit: float, pool: Pool, name: str, size: int) -> dict[str, Any]:
    """A model on ranks, and what the untouched loop did."""
    began = time.perf_counter()
    try:
        answers = pool.run(on_ranks, str(Path(__file__).parent), name, size, timeout=SECONDS)
    except CaseFailed as error:
        status = "refused" if error.kind in REFUSALS else "failed"
        return {"status": status, "text": f"{error.kind}: {error.text}"[:600], "at": error.args[0][-1500:]}
    except TimeoutError as error:
        return {"status": "timeout", "text": str(error)[:1500]}
    most, calls = max(far(want, run) for run in answers), answers[0][2]
    why = [f"{name}: {why}" for name, how, why in calls if how == "through"]
    about = {"difference": most, "how": calls[0][1] if calls else "not said", "why": [*dict.fromkeys(why)]}
    return {"status": "equal" if most <= limit else "wrong", "seconds": time.perf_counter() - began} | about


def table(done: dict[str, Any]) -> dict[str, Any]:
    """Print one line a model; gives models by their worst run, and the share of those on ranks that ran apart."""
    counts, apart = Counter[str](), list[bool]()
    for name in (name for name in MODELS if name in done):
        runs = [run for of_size in done[name].values() for run in of_size.values()]
        status = min((run["status"] for run in runs), key=WORST.index)
        hows, counts[status] = {run["how"] for run in runs if "how" in run}, counts[status] + 1
        apart += [hows == {"apart"}] if hows else []
        most = max((run["difference"] for run in runs if "difference" in run), default=float("nan"))
        why = " | ".join(dict.fromkeys(why for run in runs for why in [*run.get("why", []), run.get("text", "")]))
        print(f"{name:40} {status:12} {most:8.0e} {'/'.join(sorted(hows)):10} {why[:150]}")
    return {"models": len(done), **counts, "apart": sum(apart), "share apart": sum(apart) / max(len(apart), 1)}


def main() -> None:
    """Run what has no result yet; print the table and the totals."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for word, kind, usual in (("only", str, [""]), ("ranks", int, [2, 3]), ("rows", int, [6, 7]), ("again", str, [])):
        words.add_argument(f"--{word}", nargs="*", type=kind, default=usual)
    asked, pools, place = words.parse_args(), dict[int, Pool](), RESULTS / "whole_models.json"
    done: dict[str, Any] = json.loads(place.read_text())["models"] if place.exists() else {}
    packages = {"transformers", "timm", *(model.package for model in foreign_table.MODELS.values())}
    versions = {d.name: d.version for d in metadata.distributions() if d.name in packages}
    for name in (n for n in MODELS if any(word.lower() in n.lower() for word in asked.only)):
        for size in asked.rows:
            runs = done.setdefault(name, {}).setdefault(f"{size} rows", {})
            due = [n for n in asked.ranks if runs.get(f"{n} ranks", {}).get("status", "") in ["", *asked.again]]
            if not due and runs and runs["one device"]["status"] not in asked.again:
                continue
            want, runs["one device"] = untouched(name, size)
            for n in due if want else []:
                pool = pools.get(n) or pools.setdefault(n, Pool(n))
                limit = LIMIT_OF_FLOAT32 if runs["one device"]["float32"] else LIMIT
                runs[f"{n} ranks"] = held_against(want, limit, pool, name, size) | {"commit": commit()}
            print(name, size, {key: run["status"] for key, run in runs.items()}, flush=True)
        with redirect_stdout(None):
            keep("whole_models", {"versions": versions, "totals": table(done), "models": done})
    for pool in pools.values():
        pool.close()
    print(table(done))


if __name__ == "__main__":
    main()
