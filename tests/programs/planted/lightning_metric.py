import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X = torch.randn(96, 8)
Y = (X.sum(1) > 0).long()


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


train = DataLoader(TensorDataset(X[:64], Y[:64]), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(X[64:], Y[64:]), batch_size=8)
trainer = L.Trainer(max_epochs=2, accelerator="gpu", devices=2, precision="bf16-mixed", gradient_clip_val=1.0)
trainer.fit(Net(), train, val)
