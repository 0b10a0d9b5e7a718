"""Lightning's Trainer: one line between the Trainer and its `fit()`. What is logged is that of the whole batch.

python examples/19_lightning.py
meshwise run --devices 2xcpu examples/19_lightning.py
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        logits = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).to(logits.dtype).mean())

    def on_validation_epoch_end(self) -> None:
        values = {name: round(float(value), 6) for name, value in self.trainer.callback_metrics.items()}
        mw.print(f"epoch {self.current_epoch + 1}: {values}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.manual_seed(0)
x = torch.randn(303, 8)
data = TensorDataset(x, x.argmax(1))
train, val = DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=100)
model = Classifier()
trainer = L.Trainer(
    max_epochs=2,
    gradient_clip_val=1.0,
    num_sanity_val_steps=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)

trainer = mw.distribute(trainer)
trainer.fit(model, train, val)
mw.save(model.state_dict(), "model.pt")
