"""A graph network on one whole graph, after pytorch/examples' gcn: rows cannot cut it, so every rank runs it whole."""

import torch
from torch import nn

import meshwise as mw


class GCN(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.first, self.second = nn.Linear(features, 16), nn.Linear(16, classes)

    def forward(self, x, adjacency):
        x = torch.relu(torch.sparse.mm(adjacency, self.first(x)))
        return torch.sparse.mm(adjacency, self.second(nn.functional.dropout(x, 0.5, self.training)))


def main(epochs=6):
    torch.manual_seed(13)
    x, y = torch.randn(20, 5), torch.randint(3, (20,))
    adjacency = ((torch.rand(20, 20) < 0.2).to(x.dtype) + torch.eye(20)).to_sparse()
    train, test = torch.arange(14), torch.arange(14, 20)
    model = GCN(5, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    model, optimizer = mw.distribute(model, optimizer)
    numbers = []
    for _ in range(epochs):
        model.train()
        loss = nn.functional.cross_entropy(model(x, adjacency)[train], y[train])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        right = (model(x, adjacency)[test].argmax(1) == y[test]).sum().item()
        numbers += [loss.item(), right]
    return numbers, model.state_dict()


if __name__ == "__main__":
    print(main()[0])
