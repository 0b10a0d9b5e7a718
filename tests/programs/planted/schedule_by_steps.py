import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

MAX_TRAIN_STEPS = 16
WARMUP_STEPS = 2


def linear_schedule(optimizer, warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return max(0.0, (total - step) / (total - warmup))

    return LambdaLR(optimizer, factor)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)

    x = torch.randn(64, 8)
    y = torch.sin(x @ torch.randn(8, 2))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = linear_schedule(optimizer, WARMUP_STEPS, MAX_TRAIN_STEPS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step, epoch = 0, 0
    while step < MAX_TRAIN_STEPS:
        for xb, yb in loader:
            loss = F.mse_loss(model(xb), yb)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step >= MAX_TRAIN_STEPS:
                break
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.5f}")
        epoch += 1

    accelerator.end_training()


if __name__ == "__main__":
    main()
