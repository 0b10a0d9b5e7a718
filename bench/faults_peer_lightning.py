"""The loop of bench/faults_peer_script.py as Lightning has it: under torchrun, on from its last checkpoint."""

import lightning
import torch
from faults_peer_script import AGAIN, AT, FAULT, OUT, STEPS, happen, network, samples, written
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """The network with its loss and its optimizer; the fault comes before a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def on_train_batch_start(self, batch: object, index: int) -> None:
        """The fault, before its step."""
        if FAULT and self.global_step == AT - 1 and not AGAIN:
            happen(self.global_rank, self.net)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.last = loss.item()
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, index: int) -> None:
        """A line of the record."""
        written(self.global_rank, self.global_step, self.last)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    """Train, save every fourth step, go on from the last state."""
    lightning.seed_everything(0, verbose=False)
    x = samples()
    model = Regression()
    saves = ModelCheckpoint(OUT / "state", every_n_train_steps=4, save_last=True, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=STEPS,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    trainer.fit(model, data, ckpt_path="last" if (OUT / "state/last.ckpt").exists() else None)
    if trainer.is_global_zero:
        torch.save(model.net.state_dict(), OUT / "last.pt")


if __name__ == "__main__":
    main()
