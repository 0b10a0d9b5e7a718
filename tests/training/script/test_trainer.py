"""transformers' Trainer on several devices computes what it computes on one: weights, norms, metrics, files, resumed.

Losses that it logs are added in float32. Of integrations/trainer.py, integrations/trainer_ranks.py,
integrations/trainer_loader.py and integrations/private_parts.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwise as mw
from meshwise.reports.recorder import current
from meshwise.spec.plan import Plan
from meshwise.training.data.keyed import ExactDraws
from meshwise.training.process.session import default_engine, end_sessions
from meshwise.workers.gate import StepGate
from tests.pool import CaseFailed

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
F = nn.functional
TOKENS, WORDS = 50, 10
UNLIKE = ("runtime", "second", "time", "total_flos")
"""Times, and what was computed: a rank pads to the longest of its own rows."""


@dataclass(frozen=True)
class Case:
    """A run of a Trainer. model: `gpt2`, or how the loss of a module is a mean. ends, stops: after so many steps
    the Trainer ends, or the run is asked to stop. exact: its draws are those of one device. alone: without ours."""

    model: str
    folder: str
    plan: Plan | None = None
    options: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    ends: int = 0
    stops: int = 0
    exact: bool = False
    alone: bool = False


def texts(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, TOKENS, (6 + i % 5,), generator=generator) for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def points(count: int, seed: int, each: int) -> list[dict[str, Tensor]]:
    """With `each` labels, of which some are ignored where there are several."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        x = torch.randn(each, 3, generator=generator, dtype=torch.float64)
        y = x.argmax(-1)
        rows.append({"x": x, "labels": torch.where(x[:, 0] > 0.8, -100, y) if each > 1 else y[0]})
    return rows


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if "x" in rows[0]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    longest = max(len(row["labels"]) for row in rows)

    def filled(name: str, value: int) -> Tensor:
        return torch.stack([F.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows])

    labels = filled("labels", -100)
    return {"input_ids": filled("input_ids", 0), "attention_mask": (labels != -100).long(), "labels": labels}


class Classes(nn.Module):
    """Says nothing of num_items_in_batch: its loss is a mean, over samples or over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(3, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(torch.tanh(self.hidden(x)))
        logits = logits if labels.ndim == 2 else logits[:, 0]
        return {"loss": F.cross_entropy(logits.reshape(-1, 3), labels.reshape(-1)), "logits": logits}


class Divided(Classes):
    """Its loss is a sum, divided by its own count of the labels that count."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(x, labels)
        each = F.cross_entropy(found["logits"].reshape(-1, 3), labels.reshape(-1), reduction="none")
        return {**found, "loss": each.sum() / (labels != -100).sum()}


class Noisy(torch.utils.data.Dataset[Any]):
    """Draws for each sample, in numbers that another number of devices reads elsewhere."""

    def __len__(self) -> int:
        return 27

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.rand(1, 3, dtype=torch.float64)
        return {"x": x, "labels": torch.tensor(index % 3)}


class Drops(Classes):
    """Draws in its forward."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return super().forward(F.dropout(x, 0.5), labels)


class Masking:
    """A collator that says that it masks at random."""

    mlm = True

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return collate(rows)


class Renamed(transformers.PreTrainedModel):
    """transformers saves its weights under other names than it has, as those of a ViT."""

    config_class = transformers.ViTConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inner = Classes()
        self.post_init()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.inner(x, labels)
        return found

    def save_pretrained(self, folder: Any, save_original_format: bool = True, **options: Any) -> None:
        state = {k.replace("inner", "old") if save_original_format else k: v for k, v in self.state_dict().items()}
        super().save_pretrained(folder, **{**options, "state_dict": state})


class Routed(Classes):
    """Its loss is a sum over num_items_in_batch, and a term of its rows besides."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> dict[str, Tensor]:  # type: ignore[override]
        found = super().forward(x, labels)
        mean = found["loss"] if num_items_in_batch is None else found["loss"] * len(x) / num_items_in_batch
        return {**found, "loss": mean + 0.01 * found["logits"].square().mean()}


class Gathers(transformers.Trainer):
    """Gathers two rows for each sample, as TRL's RewardTrainer does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        found = model(**inputs)
        rows = torch.cat([found["logits"][:, 0], found["logits"][:, 1]]).detach()
        self.gathered = [*getattr(self, "gathered", []), float(self.accelerator.gather(rows).sum())]
        return (found["loss"], found) if return_outputs else found["loss"]


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "routed":
        return Routed().double()
    if kind == "renamed":
        return Renamed(transformers.ViTConfig()).double()  # type: ignore[no-any-return]
    if kind != "gpt2":
        return {"divided": Divided, "drops": Drops}.get(kind, Classes)().double()
    dropped = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    sizes = {"vocab_size": TOKENS, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 2}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropped)).double()
    return model


def metrics_of(found: Any) -> dict[str, float]:
    logits, labels = found.predictions, found.label_ids
    counted = logits[labels != -100]
    return {"rows": len(labels), "mean": float(counted.mean()), "correct": float((logits.argmax(-1) == labels).sum())}


def train(case: Case) -> dict[str, Any]:
    """What a run leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)  # transformers computes losses in float32
        return _train(case)


def _train(case: Case) -> dict[str, Any]:
    data = (
        texts
        if case.model == "gpt2"
        else lambda n, seed: points(n, seed, 4 if case.model in ("items", "divided") else 1)
    )
    common = {
        "per_device_train_batch_size": 5, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "no", "report_to": "none", "use_cpu": True, "seed": 5, "warmup_steps": 1,
        "lr_scheduler_type": "cosine", "disable_tqdm": True, "include_num_input_tokens_seen": "non_padding",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(case.folder, **{**common, **case.options})
    callbacks: list[Any] = [End(case.ends or case.stops, stops=case.stops > 0)] if case.ends or case.stops else []
    callbacks += [transformers.EarlyStoppingCallback(2)] if args.load_best_model_at_end else []
    trainer = (Gathers if case.model == "pairs" else transformers.Trainer)(
        model_of(case.model),
        args,
        data_collator=Masking() if case.model == "masks" else collate,
        train_dataset=Noisy() if case.model == "drops" else data(27, 1),
        eval_dataset=data(11, 2),
        compute_metrics=metrics_of,
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    default_engine().draws = ExactDraws() if case.exact else None
    assert case.alone or mw.distribute(trainer, plan=case.plan) is trainer
    assert case.alone or current().program == "trainer", "of which the report's advice is"
    default_engine().gate = StepGate()
    try:
        trainer.train(resume_from_checkpoint=case.resume)
    except SystemExit:
        said = [note for note in default_engine().notes if note.startswith("saved ")]
        return {"steps": trainer.state.global_step, "said": said, "saves": default_engine().gate.saves}
    predicted = trainer.predict(data(7, 3))
    trainer.save_model(f"{case.folder}/end")
    state = trainer.state
    return {
        "weights": torch.cat([full(p).flatten() for p in trainer.model.parameters()]),
        "steps": state.global_step,
        "gathered": getattr(trainer, "gathered", []),
        "best": Path(state.best_model_checkpoint or "").name,
        "tokens": state.num_input_tokens_seen,
        "predictions": torch.from_numpy(predicted.predictions[predicted.label_ids != -100]),
        "metrics": {k: v for k, v in predicted.metrics.items() if not any(t in k for t in UNLIKE)},
        "log": [{k: v for k, v in each.items() if not any(t in k for t in UNLIKE)} for each in state.log_history],
    }


class End(transformers.TrainerCallback):
    """Ends a run after so many steps, in the middle of an epoch; stops: as who stops it from outside."""

    def __init__(self, step: int, *, stops: bool) -> None:
        self.step, self.stops = step, stops

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step and self.stops:
            default_engine().gate.set_last(default_engine().gate.freeze())
        elif state.global_step == self.step:
            control.should_training_stop = True


def full(p: Tensor) -> Tensor:
    return p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach().clone()  # type: ignore[operator]


def assert_alike(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name in ("weights", "predictions"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-10)
    for name in ("steps", "best", "tokens"):
        assert got[name] == want[name], name
    assert got["gathered"] == pytest.approx(want["gathered"], rel=1e-9)
    assert got["metrics"] == pytest.approx(want["metrics"], rel=1e-9)
    assert len(got["log"]) == len(want["log"])
    for one, other in zip(got["log"], want["log"], strict=True):
        floats = {name: 1e-6 if name in ("loss", "train_loss") else 1e-9 for name in one}
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(other[name], rel=floats[name]), (name, one["step"])


def equal(pool: Any, tmp_path: Path, ranks: tuple[int, ...], **case: Any) -> None:
    end_sessions()
    want = train(Case(folder=str(tmp_path / "one"), **case))
    for count in ranks:
        for got in pool(count).run(train, Case(folder=str(tmp_path / f"{count}"), **case)):
            assert_alike(got, want)


def test_a_mean_over_all_tokens_of_a_step_is_that_of_one_device(pool: Any, tmp_path: Path) -> None:
    best = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "mean"}
    equal(pool, tmp_path, (2, 3), model="gpt2", options={**best, "save_total_limit": 1}, ends=5)
    saved = [sorted(p.name for p in (tmp_path / which).rglob("*")) for which in ("one", "2", "3")]
    assert saved[0] == saved[1] == saved[2]


def test_a_loss_that_is_a_mean_itself_is_weighed_by_what_it_is_over(pool: Any, tmp_path: Path) -> None:
    equal(pool, tmp_path / "samples", (3,), model="samples", options={"max_grad_norm": 0.01})
    equal(pool, tmp_path / "items", (2,), model="items", options={"batch_eval_metrics": False})
    equal(pool, tmp_path / "divided", (2,), model="divided")


@pytest.mark.parametrize("plan", [Plan(shard=2), Plan(data=2, zero1=True)], ids=str)
def test_a_plan_divides_the_model_and_its_files_are_those_of_one_device(pool: Any, tmp_path: Path, plan: Plan) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    end_sessions()
    want = train(Case("gpt2", str(tmp_path / "one"), options=saves))
    for got in pool(2).run(train, Case("gpt2", str(tmp_path / "two"), plan, options=saves)):
        assert_alike(got, want)
    one, two = (torch.load(tmp_path / name / "checkpoint-4/optimizer.pt") for name in ("one", "two"))
    assert one["state"].keys() == two["state"].keys()
    for key, state in one["state"].items():
        torch.testing.assert_close(two["state"][key], state, rtol=1e-9, atol=1e-12)


def test_a_run_that_was_stopped_goes_on_with_another_number_of_devices(pool: Any, tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 100}
    end_sessions()
    want = train(Case("gpt2", str(tmp_path / "one"), options=saves))
    there = str(tmp_path / "two/checkpoint-1")
    said = f"saved {there}. To resume from this state, call trainer.train(resume_from_checkpoint=True)."
    for got in pool(2).run(train, Case("gpt2", str(tmp_path / "two"), options=saves, stops=1)):
        assert got == {"steps": 1, "said": [said], "saves": True}
    del want["log"][-1]["train_loss"]  # Trainer's own is that of the steps since it was started
    for got in pool(3).run(train, Case("gpt2", str(tmp_path / "three"), options=saves, resume=there)):
        del got["log"][-1]["train_loss"]
        assert_alike(got, want)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("samples", {"auto_find_batch_size": True}, "does not support auto_find_batch_size"),
        ("samples", {"optim": "lomo"}, "does not support optim=lomo"),
        ("masks", {}, "does not support --exact-random with a collator that masks at random"),
        ("routed", {}, "the loss of Routed is a sum over num_items_in_batch plus another term"),
    ],
)
def test_what_cannot_be_the_same_is_refused_by_name(
    pool: Any, tmp_path: Path, model: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CaseFailed, match=message):
        pool(2).run(train, Case(model, str(tmp_path), options=options, exact=model == "masks"))


def test_all_rows_are_gathered_and_none_of_padding(pool: Any, tmp_path: Path) -> None:
    plain = train(Case("pairs", str(tmp_path / "plain"), alone=True))
    assert_alike(train(Case("pairs", str(tmp_path / "ours"))), plain)
    equal(pool, tmp_path, (2, 3), model="pairs")


def test_exact_draws_of_a_model_are_apart_from_those_of_data_that_is_read_ahead(pool: Any, tmp_path: Path) -> None:
    equal(pool, tmp_path, (2, 3), model="drops", exact=True)


def test_a_checkpoint_has_the_names_that_a_trainer_loads(pool: Any, tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}
    end_sessions()
    want = train(Case("renamed", str(tmp_path / "one"), options=saves))
    del want["log"][-1]["train_loss"]
    for got in pool(2).run(train, Case("renamed", str(tmp_path / "two"), resume=str(tmp_path / "one/checkpoint-2"))):
        del got["log"][-1]["train_loss"]
        torch.testing.assert_close(got["weights"], want["weights"], rtol=1e-9, atol=1e-10)
    with pytest.raises(CaseFailed, match=r"this checkpoint, .* has a value old.hidden.* but no inner.hidden"):
        pool(2).run(train, Case("renamed", str(tmp_path / "three"), resume=str(tmp_path / "one/end")))
