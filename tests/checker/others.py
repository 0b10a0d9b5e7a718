"""Scripts as others write them, with what a check once took for a fault, did not see, or fell over."""

from __future__ import annotations

HEAD = """
import copy
import io

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import meshwise as mw

torch.manual_seed(0)
x, y = torch.randn(29, 6), torch.randint(3, (29,))
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
"""

DIFFUSION = """
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.first, self.last = nn.Embedding(50, 16), nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x, t):
        return self.last(torch.relu(self.first(x) + self.time(t)))


model = Denoiser()
kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for (x,) in loader:
    t = torch.randint(0, 50, (len(x),))
    noise = torch.randn_like(x)
    share = kept[t].unsqueeze(1)
    loss = nn.functional.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)
    mw.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

WHOLE_BATCHES = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, drop_last=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    assert len(x) * mw.world_size() == 8, f"a ragged batch of {len(x)}"
    mw.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""

CLOSURE = """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
loader = DataLoader(TensorDataset(x, y), batch_size=29)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(4):
    for x, y in loader:
        def closure():
            optimizer.zero_grad()
            return mw.backward(nn.functional.cross_entropy(model(x), y))

        optimizer.step(closure)
"""

SCALED = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    mw.backward(scaler.scale(loss))
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""

SAVED = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded, copied = torch.load(file, weights_only=False).eval(), copy.deepcopy(model).eval()
    x = torch.ones(2, 6)
    assert torch.equal(loaded(x), copied(x))
"""

OBJECTS = """
class Graphs:
    def __init__(self, nodes, graph, y):
        self.nodes, self.graph, self.y = nodes, graph, y

    def to(self, device):
        return Graphs(self.nodes.to(device), self.graph.to(device), self.y.to(device))


class Data(Dataset):
    def __init__(self):
        random = np.random.default_rng(1)
        self.graphs = [(random.standard_normal((3 + i % 4, 6), dtype=np.float32), i % 3) for i in range(29)]

    def __len__(self):
        return 29

    def __getitem__(self, index):
        return self.graphs[index]


def collate(graphs):
    nodes = torch.from_numpy(np.concatenate([nodes for nodes, _ in graphs]))
    number = torch.cat([torch.full((len(nodes),), n) for n, (nodes, _) in enumerate(graphs)])
    return Graphs(nodes, number, torch.tensor([y for _, y in graphs]))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, graphs):
        hidden = torch.tanh(self.first(graphs.nodes))
        return self.last(hidden.new_zeros(len(graphs.y), 16).index_add_(0, graphs.graph, hidden))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Data(), batch_size=8, shuffle=True, collate_fn=collate)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for graphs in loader:
    graphs = graphs.to("cpu")
    mw.backward(nn.functional.cross_entropy(model(graphs), graphs.y))
    optimizer.step()
    optimizer.zero_grad()
"""

EXPERTS = """
import transformers

config = transformers.{kind}Config(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, {more}
)
model = transformers.{kind}ForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randint(61, (29, 10))), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for (ids,) in loader:
    mw.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
"""

MIXTURES = {
    "Mixtral": HEAD + EXPERTS.format(kind="Mixtral", more="num_local_experts=4"),
    "Qwen2Moe": HEAD
    + EXPERTS.format(
        kind="Qwen2Moe",
        more="moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=4, num_experts_per_tok=2",
    ),
}
"""Mixtures of experts as transformers has them."""

COUPLED = """
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 7))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, x + 0.1 * torch.randn(29, 6)), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for a, b in loader:
    a, b = model(a), model(b)
    {loss}
    mw.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""

WEIGHTED = """
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
y = torch.randint(8, (29,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    mw.backward(nn.functional.cross_entropy(model(x), y, weight=torch.arange(1.0, 9.0)))
    optimizer.step()
    optimizer.zero_grad()
"""

CLASSIFIES = """optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    mw.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""
"""Trains `model` on what HEAD makes."""

ROUTED = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(2))

    def forward(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.all):
            rows = (x[:, 0] > 0) == bool(number)
            out[rows] = expert(x[rows])
        return out


model = nn.Sequential(nn.Linear(6, 6), Experts(), nn.Linear(6, 3))
"""
ROUTED += CLASSIFIES

MASKED = """
class Masked(nn.Module):
    def forward(self, x):
        return x * torch.from_numpy(np.random.random_sample(len(x)) > 0.5).unsqueeze(1)


model = nn.Sequential(nn.Linear(6, 6), Masked(), nn.Linear(6, 3))
"""
MASKED += CLASSIFIES

AVERAGED = """
averaged = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model, averaged, optimizer, loader = mw.distribute(model, averaged, optimizer, loader, view="rank")
for epoch in range(2):
    for x, y in loader:
        mw.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    averaged.update_parameters(model)
torch.optim.swa_utils.update_bn(loader, averaged)
"""

CONTRASTIVE = """a, b = nn.functional.normalize(a), nn.functional.normalize(b)
    loss = nn.functional.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))"""
SOFTEST = "loss = (a * b).sum(1).logsumexp(0)"
A_SHARE = HEAD + WHOLE_BATCHES.replace("size=8", "size=8 // mw.world_size()").replace("    assert", "    # assert")

EQUAL = {
    "random numbers of a diffusion loss": HEAD + DIFFUSION,
    "batches that are all whole": HEAD + WHOLE_BATCHES,
    "a closure of LBFGS": HEAD + CLOSURE,
    "a loss scaler": HEAD + SCALED,
    "a model that is saved whole": HEAD + SAVED,
    "batches that are objects": HEAD + OBJECTS,
    "statistics of an averaged model": HEAD + AVERAGED,
}
"""Scripts that are right, so that both sides are equal."""

WRONG = {
    "every sample with every other": (HEAD + COUPLED.format(loss=CONTRASTIVE), "coupled samples", "train.py:23"),
    "a soft maximum over the batch": (HEAD + COUPLED.format(loss=SOFTEST), "coupled samples", "not a mean over ranks"),
    "class weights that nobody says": (HEAD + WEIGHTED, "loss weighting", "is a mean over"),
    "draws of numpy": (HEAD + MASKED, "module", "Masked"),
    "dropout in experts": (HEAD + ROUTED, "dropout masks", "rows that are not those of the samples"),
    "a batch size for each device": (A_SHARE, "batch size depends on devices", "is 4 on 2 devices, but 8 on one"),
}
"""Scripts that differ: the cause, and what its evidence says."""
