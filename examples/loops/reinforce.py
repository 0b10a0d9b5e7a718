"""Reinforcement learning after pytorch/examples' reinforce and actor_critic: an episode cannot be cut by rows."""

import torch
from torch import nn
from torch.distributions import Categorical

import meshwise as mw


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.dropout = nn.Linear(2, 16), nn.Dropout(0.6)
        self.action, self.value = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, state):
        hidden = torch.relu(self.dropout(self.hidden(state)))
        return torch.softmax(self.action(hidden), -1), self.value(hidden)


def play(policy, most=20):
    """A cart that is pushed left or right, and stays near the middle for a reward of 1 a step."""
    place, speed = torch.rand(2).sub(0.5).tolist()
    log_probs, values, rewards = [], [], []
    while abs(place) < 1 and len(rewards) < most:
        probabilities, value = policy(torch.tensor([place, speed]))
        drawn = Categorical(probabilities)
        action = drawn.sample()
        speed += 0.1 * (2 * action.item() - 1) + 0.05 * torch.randn(()).item()
        place += 0.2 * speed
        log_probs.append(drawn.log_prob(action))
        values.append(value)
        rewards.append(1.0)
    return torch.stack(log_probs), torch.cat(values), rewards


def main(episodes=5):
    torch.manual_seed(543)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    policy, optimizer = mw.distribute(policy, optimizer)
    numbers = []
    for _ in range(episodes):
        log_probs, values, rewards = play(policy)
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        gain = (returns - values.detach()) / returns.std().clamp(min=1e-3)
        loss = -(log_probs * gain).sum() + nn.functional.smooth_l1_loss(values, returns, reduction="sum")
        loss.backward()
        numbers += [loss.item(), len(rewards)]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, policy.state_dict()


if __name__ == "__main__":
    print(main()[0])
