"""A loop of one's own under any plan: the plan is said where the script is run, and no line of it changes.

python examples/11_plans.py                                       on one device
meshwise run --devices 2xcpu --set shard=2 examples/11_plans.py   each of two holds half of the model: the same numbers
meshwise check --set shard=2 examples/11_plans.py                 proves that they are
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw

torch.manual_seed(0)
points = torch.randn(1200, 2)
inside = (points.norm(dim=1) < 1.2).long()
train = DataLoader(TensorDataset(points[:1000], inside[:1000]), batch_size=32, shuffle=True)
test = DataLoader(TensorDataset(points[1000:], inside[1000:]), batch_size=32)

model = nn.Sequential(
    nn.Linear(2, 96, bias=False), nn.BatchNorm1d(96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5 * len(train))

model, optimizer, scheduler, train, test = mw.distribute(model, optimizer, scheduler, train, test)

for epoch in range(5):
    model.train()
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in test:
            right += (model(x).argmax(1) == y).sum().item()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}, {right / len(test.dataset):.2%} of the test set right")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "plans.pt")  # as one device writes it
