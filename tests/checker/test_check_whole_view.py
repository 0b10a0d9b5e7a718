"""`meshwise check` of scripts that see whole batches: those that are right are equal, and a fault is named."""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.spec.errors import UsageError
from meshwise.spec.plan import Plan
from tests.checker.script_sides import as_it_was, proof  # noqa: F401
from tests.pool import CaseFailed

BEGIN = """
import torch, meshwise as mw
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(96, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
loader = DataLoader(data, 12, shuffle=True, collate_fn=COLLATE)
"""
APART = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 16), NORM(16), nn.Dropout(0.3), nn.Linear(16, 2)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        h = self.drop(torch.relu(self.norm(self.a(x))))
        return self.b(self.drop(h.tanh()) if self.calls % EACH == 0 else h) * (1 + FAULT)
model = nn.Sequential(Net())
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="whole")
for epoch in range(3):
    for number, (a, b) in enumerate(loader):
        loss = F.cross_entropy(model(a + 0.1 * torch.randn(a.shape)), b) / 2
        loss.backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        right = sum((model.eval()(a).argmax(1) == b).sum() for a, b in loader)
        print(loss.item(), right.item(), model.train()[0].calls)
"""
THROUGH = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.block = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
    def forward(self, x):
        h = self.a(x)
        return self.block(h - h.mean(0))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="whole")
for a, b in loader:
    z = F.normalize(model(torch.cat([a, a + 0.1 * torch.randn_like(a)])), dim=1)
    n = len(a)
    likely = (z @ z.T).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    loss = F.cross_entropy(likely, torch.cat([torch.arange(n) + n, torch.arange(n)]))
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()])):
        p.grad = g
    optimizer.step()
"""
TWO = """
G, D = (nn.Sequential(nn.Linear(n, 8), nn.Tanh(), nn.Linear(8, m)) for n, m in ((4, 8), (8, 1)))
optimizers = torch.optim.SGD(G.parameters(), 0.1), torch.optim.SGD(D.parameters(), 0.1)
G, D, of_g, of_d, loader = mw.distribute(G, D, *optimizers, loader, view="whole")
judge = nn.BCEWithLogitsLoss()
for real, _ in loader:
    n, fake = len(real), G(torch.randn(len(real), 4))
    of_d.zero_grad()
    judge(D(real), torch.ones(n, 1)).backward()
    judge(D(fake.detach()), torch.zeros(n, 1)).backward()
    of_d.step()
    of_g.zero_grad()
    judge(D(fake), torch.ones(n, 1)).backward()
    of_g.step()
"""
WITH_NORM = APART.replace("NORM", "nn.BatchNorm1d").replace("EACH", "999")
RIGHT = {
    "apart": WITH_NORM.replace("FAULT", "0"),
    "more operators in each third call": APART.replace("NORM", "nn.LayerNorm")
    .replace("EACH", "3")
    .replace("FAULT", "0"),
    "through": THROUGH,
    "two optimizers": TWO,
}
PLANS = {
    "data": Plan(data=2),
    "shard": Plan(shard=2),
    "zero1": Plan(data=2, zero1=True),
    "three": Plan(data=3),
}
OWN = "lambda rows: [torch.stack(each) for each in zip(*rows)]"


@pytest.mark.parametrize(
    ("script", "plan"),
    [
        ("apart", "data"),
        ("through", "data"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("apart", "shard"), ("through", "three")]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("apart", "zero1"), ("two optimizers", "three")]),
        pytest.param("more operators in each third call", "data", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_is_right_is_equal(script: str, plan: str, pool: Any) -> None:
    begin = BEGIN.replace("COLLATE", OWN if script == "through" else "None")
    found = proof(begin + RIGHT[script], pool, PLANS[plan], size=PLANS[plan].devices)
    assert found.equal, found.comparison.first
    kinds = {compared.kind: compared.count for compared in found.comparison.kinds}
    assert kinds["gradients"] >= 3 and kinds["module outputs"] >= 3 and kinds["batch contents"] >= 3
    assert not any(text.startswith("draws") for text in found.comparison.left_out)


def test_a_fault_of_a_rank_is_named(pool: Any) -> None:
    found = proof(BEGIN.replace("COLLATE", "None") + WITH_NORM.replace("FAULT", "0.01 * mw.rank()"), pool)
    assert found.comparison.first is not None
    assert (found.comparison.first.kind, found.module) == ("module outputs", "0")


def test_what_no_optimizer_updates_is_not_judged(pool: Any) -> None:
    text = THROUGH.replace("p.grad = g", "p.data -= 0.1 * g").replace("    optimizer.step()\n", "")
    with pytest.raises((CaseFailed, UsageError), match="not judged"):
        proof(BEGIN.replace("COLLATE", "None") + text, pool)
