"""Lightning's Trainer on several devices computes what it computes on one: weights, values, files, predictions.

Of integrations/lightning.py, integrations/lightning_strategy.py, training/script/trainers.py and
integrations/private_parts.py.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.reports.recorder import current
from meshwise.spec.plan import Plan
from meshwise.training.process.session import default_engine, end_sessions
from meshwise.workers.gate import StepGate

L = pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
torchmetrics = pytest.importorskip("torchmetrics")
F = nn.functional


@dataclass(frozen=True)
class Case:
    """A run of a Trainer. ours: with the line of meshwise. stops: after so many batches the run is asked to stop."""

    folder: str
    ours: bool = True
    plan: Plan | None = None
    options: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    stops: int = 0
    model: Any = None
    stream: bool = False


class Classes(L.LightningModule):
    """Logs what one logs, with a metric and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double()
        self.seen = torchmetrics.Accuracy(task="multiclass", num_classes=3, average="macro")
        self.auroc = torchmetrics.AUROC(task="multiclass", num_classes=3)
        self.mean = torchmetrics.MeanMetric()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        self.log("most", logits.max(), reduce_fx="max", on_epoch=True, on_step=True)
        self.log("ones", (y == 1).double().sum(), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("seen", self.seen(logits, y), on_step=True, on_epoch=False)
        self.log("penalty", sum(p.square().sum() for p in self.parameters()))
        return {"loss": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        logits = self(x)
        self.auroc.update(logits, y)
        self.mean(F.cross_entropy(logits, y))
        self.log("val_correct", (logits.argmax(1) == y).sum().double())
        self.log("val_sum", F.cross_entropy(logits, y, reduction="sum") / 7)
        self.log("val_least", -logits.amax(1).min(), batch_size=4)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_auroc": self.auroc, "val_mean": self.mean})

    def on_validation_epoch_end(self) -> None:
        self.log("val_twice", 2 * self.auroc.compute())

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Any:
        return {"logits": self(batch[0]), "names": [f"{float(x[0]):.6f}" for x in batch[0]]}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        each = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": each, "monitor": "val_loss"}}


class Summed(Classes):
    """Its loss is a sum."""

    def training_step(self, batch: Any, index: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Weighted(Classes):
    """Its loss is a mean over the weights of the classes."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 5.0]).double())
        self.log("loss", loss, on_epoch=True)
        return loss

    def test_step(self, batch: Any, index: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor([1.0, 2.0, 5.0]).double())
        self.log("test_loss", loss)


class Manual(Classes):
    """Steps itself, calls its parts, and logs values that no batch adds up to."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        logits, optimizer = self.net(x), self.optimizers()
        loss = F.cross_entropy(logits, y)
        self.log("ratio", logits.norm() / (1 + (y == 1).sum()), on_epoch=True)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss}


class Lbfgs(Summed):
    """Its optimizer asks for the loss several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.argmax(1))


class Stream(torch.utils.data.IterableDataset):
    """Of unknown length."""

    def __iter__(self) -> Any:
        return iter(data(27, 1))


class Kept(L.pytorch.loggers.Logger):
    """What was logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step or 0, dict(metrics)))


class Stop(L.pytorch.Callback):
    """As who stops a run from outside."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches -= 1
        if self.batches == 0:
            default_engine().gate.set_last(default_engine().gate.freeze())


def train(case: Case) -> dict[str, Any]:
    """What a run leaves."""
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _train(case)
    finally:
        torch.set_default_dtype(torch.float32)


def _train(case: Case) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    logger = Kept()
    saves = L.pytorch.callbacks.ModelCheckpoint(case.folder, monitor="val_loss", save_top_k=1, save_last=True)
    early = L.pytorch.callbacks.EarlyStopping("val_loss", patience=3)
    common = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1, "deterministic": False,
              "enable_progress_bar": False, "enable_model_summary": False}  # fmt: skip
    callbacks = [saves, early, *([Stop(case.stops)] if case.stops else [])]
    trainer = L.Trainer(**{**common, **case.options}, logger=logger, callbacks=callbacks, default_root_dir=case.folder)
    if case.ours:
        assert mw.distribute(trainer, plan=case.plan) is trainer
        default_engine().gate = StepGate()
    model = case.model()
    loader, test = DataLoader(data(27, 1), batch_size=5, shuffle=True), DataLoader(data(11, 2), batch_size=4)
    if case.stream:
        loader, test = DataLoader(Stream(), batch_size=5), DataLoader(Stream(), batch_size=4)
    try:
        trainer.fit(model, loader, test, ckpt_path=case.resume)
    except SystemExit:
        said = [note for note in default_engine().notes if note.startswith("saved ")]
        return {"steps": trainer.global_step, "said": said, "saves": default_engine().gate.saves}
    evaluated = trainer.test(model, test, verbose=False)
    predicted = trainer.predict(model, DataLoader(data(7, 3), batch_size=4))
    trainer.save_checkpoint(f"{case.folder}/end.ckpt")
    saved = torch.load(f"{case.folder}/end.ckpt", weights_only=True)
    return {
        "weights": torch.cat([each.flatten() for each in saved["state_dict"].values()]),
        "state": [t for each in saved["optimizer_states"][0]["state"].values() for t in each.values()],
        "predictions": torch.cat([batch["logits"] for batch in predicted]),
        "names": [name for batch in predicted for name in batch["names"]],
        "steps": trainer.global_step,
        "best": Path(saves.best_model_path).name,
        "losses": model.losses,
        "test": evaluated[0],
        "log": logger.lines,
    }


def assert_alike(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name in ("weights", "predictions", "state"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-10)
    for name in ("steps", "best", "names"):
        assert got[name] == want[name], name
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-9)
    assert got["test"] == pytest.approx(want["test"], rel=1e-9)
    assert [step for step, _ in got["log"]] == [step for step, _ in want["log"]]
    for (step, one), (_, other) in zip(got["log"], want["log"], strict=True):
        assert one == pytest.approx(other, rel=1e-9), step


def equal(pool: Any, tmp_path: Path, ranks: tuple[int, ...], **case: Any) -> None:
    case = {"model": Classes, **case}
    want = train(Case(folder=str(tmp_path / "alone"), **{**case, "ours": False, "plan": None}))
    end_sessions()
    assert_alike(train(Case(folder=str(tmp_path / "one"), **{**case, "plan": None})), want)
    for count in ranks:
        for got in pool(count).run(train, Case(folder=str(tmp_path / f"{count}"), **case)):
            assert_alike(got, want)


def test_every_value_is_that_of_one_device(pool: Any, tmp_path: Path) -> None:
    equal(pool, tmp_path, (2, 3), options={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
    files = [sorted(p.name for p in (tmp_path / which).rglob("*")) for which in ("alone", "one", "2", "3")]
    assert files[0] == files[1] == files[2] == files[3]


def test_a_loss_is_weighed_by_what_it_is_over(pool: Any, tmp_path: Path) -> None:
    equal(pool, tmp_path / "sum", (2,), model=Summed, stream=True, options={"accumulate_grad_batches": 4})
    equal(pool, tmp_path / "manual", (2,), model=Manual)
    equal(pool, tmp_path / "weights", (3,), model=Weighted, options={"val_check_interval": 3})


@pytest.mark.parametrize("plan", [Plan(shard=2), Plan(data=2, zero1=True)], ids=str)
def test_a_plan_divides_the_model_and_its_files_are_those_of_one_device(pool: Any, tmp_path: Path, plan: Plan) -> None:
    equal(pool, tmp_path, (2,), plan=plan, options={"gradient_clip_val": 0.1})


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 8), (2, 5)])
def test_a_run_that_was_stopped_goes_on_with_another_number_of_devices(
    pool: Any, tmp_path: Path, accumulated: int, steps: int
) -> None:
    """Of two batches that make a step the first one's gradients were lost: the second is waited for."""
    options: dict[str, Any] = {"model": Classes, "options": {"accumulate_grad_batches": accumulated}}
    want = train(Case(str(tmp_path / "one"), **options))
    end_sessions()
    there = str(tmp_path / "two/last.ckpt")
    said = f'saved {there}. To resume from this state, call trainer.fit(…, ckpt_path="{there}").'
    for got in pool(2).run(train, Case(str(tmp_path / "two"), stops=7 + accumulated, **options)):
        assert got == {"steps": steps, "said": [said], "saves": True}
    got = pool(3).run(train, Case(str(tmp_path / "two"), resume=there, **options))[0]
    for name in ("log", "losses"):
        want[name] = want[name][-len(got[name]) :]
    for line in (next(line for _, line in each["log"] if "ones" in line) for each in (got, want)):
        for name in ("loss_epoch", "ones", "most_epoch"):  # Lightning's own: of the batches since it began
            line.pop(name)
    assert_alike(got, want)


class Names(L.pytorch.Callback):
    """The names that callbacks can monitor at the end of each validation; saves in the second epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, list[set[str]]()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 8:
            trainer.save_checkpoint(self.folder / "kept.ckpt")

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(set(trainer.callback_metrics))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ours", [False, True])
def test_a_resumed_run_has_the_names_that_lightning_itself_has_then(tmp_path: Path, ours: bool) -> None:
    """A mean over an epoch before the cut is in no checkpoint of Lightning's: only a whole run still has it."""
    seen = []
    for resume in (None, tmp_path / "kept.ckpt"):
        end_sessions()
        names, quiet = Names(tmp_path), {"enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, callbacks=[names],
                            default_root_dir=tmp_path, **quiet)  # fmt: skip
        trainer = mw.distribute(trainer) if ours else trainer
        assert not ours or current().program == "lightning", "of which the report's advice is"
        trainer.fit(
            Classes(), DataLoader(data(27, 1), batch_size=5), DataLoader(data(11, 2), batch_size=4), ckpt_path=resume
        )
        seen.append(names.seen[-1])
    assert seen[0] - seen[1] == {"loss_epoch", "most_epoch", "ones"} and seen[1] <= seen[0]


REFUSED = [
    ({"options": {"devices": 2, "strategy": "ddp"}}, "does not support DDPStrategy (2 devices)"),
    ({"model": Lbfgs}, "does not support LBFGS: it computes the loss several times"),
]


def refusals(folder: str, cases: list[dict[str, Any]]) -> list[str]:
    found = []
    for case in cases:
        end_sessions()
        with pytest.raises(mw.UsageError) as error:
            train(Case(folder, **{"model": Classes, **case}))
        found.append(str(error.value))
    return found


def test_what_cannot_be_the_same_is_refused_by_name(pool: Any, tmp_path: Path) -> None:
    for found in pool(2).run(refusals, str(tmp_path), [case for case, _ in REFUSED]):
        for text, (_, message) in zip(found, REFUSED, strict=True):
            assert message in text
