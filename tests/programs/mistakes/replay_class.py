"""A replay memory, a class with a deque, keeps samples of this rank alone. Expected: check."""

# After https://github.com/openai/baselines/issues/1211: each worker holds a replay buffer of its own

import random
from collections import deque

# usual imports

class ReplayMemory:
    def __init__(self, capacity: int) -> None:
        self.memory: deque = deque(maxlen=capacity)

    def push(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.memory.extend(zip(x, y))

    def sample(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        picked = random.sample(self.memory, min(number, len(self.memory)))
        return torch.stack([x for x, _ in picked]), torch.stack([y for _, y in picked])


torch.manual_seed(0)
random.seed(0)
X = torch.randn(192, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(X, X.sum(1, keepdim=True)), batch_size=16)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")  # wrong
# right: model, optimizer = mw.distribute(model, optimizer, view="rank")
memory = ReplayMemory(64)
for x, y in loader:
    memory.push(x, y)
    old_x, old_y = memory.sample(16)  # wrong
    # right: x, y, old_x, old_y = mw.split(x, y, *memory.sample(16))
    loss = mw.backward((model(x) - y).square().mean() + (model(old_x) - old_y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
mw.print(f"loss {loss.item():.6f}")
