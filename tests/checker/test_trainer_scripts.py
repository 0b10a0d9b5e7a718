"""Scripts inside Lightning's Trainer are checked as loops of one's own are, validation and metrics too.

Of integrations/lightning.py, integrations/lightning_strategy.py and integrations/private_parts.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.checker.script_sides import as_it_was, proof  # noqa: F401
from tests.checker.strangers import changed

LIGHTNING = """import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw


class Classes(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.seen = torchmetrics.Accuracy(task="multiclass", num_classes=8)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        logits = self.net(batch[0])
        self.seen(logits, batch[1])
        self.log("seen", self.seen)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        each = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": each, "monitor": "val_loss"}}


L.seed_everything(0, verbose=False)
x = torch.randn(103, 8)
data = TensorDataset(x, x.argmax(1))
train, val = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=20)
trainer = L.Trainer(
    max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    accelerator="cpu", callbacks=[L.pytorch.callbacks.EarlyStopping("val_loss")],
)
trainer = mw.distribute(trainer)
trainer.fit(Classes(), train, val)
"""


def checked(pool: Any, *changes: tuple[str, str]) -> set[str]:
    """The ends of what a check calls the numbers of an evaluation: `after step 3`. Both sides are equal."""
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    pytest.importorskip("torchmetrics")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = proof(changed(LIGHTNING, *changes), pool)
    assert found.equal, (found.comparison.first, found.cause)
    return {each.name.partition(", ")[2] for each in found.comparison.differences if each.kind == "evaluation"}


def test_a_metric_of_a_sanity_validation_is_numbered_alike(pool: Any) -> None:
    assert "after step 0" in checked(pool)


def test_a_check_goes_on_to_the_validation_that_callbacks_and_schedulers_wait_for(pool: Any) -> None:
    assert "after step 3" in checked(pool, ("max_epochs=2", "max_epochs=2, num_sanity_val_steps=0"))
