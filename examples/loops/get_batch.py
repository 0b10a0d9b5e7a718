"""A language model without a loader, after nanoGPT's train.py: each batch is drawn in the loop."""

import torch
from torch import nn

import meshwise as mw

BLOCK, BATCH, LETTERS = 8, 6, 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, 16), nn.Embedding(BLOCK, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, LETTERS)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK)
        hidden = self.block(self.letters(x) + self.places.weight, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def get_batch(text):
    starts = torch.randint(len(text) - BLOCK, (BATCH,))
    x = torch.stack([text[i : i + BLOCK] for i in starts])
    y = torch.stack([text[i + 1 : i + 1 + BLOCK] for i in starts])
    return mw.split(x, y)


@torch.no_grad()
def estimate_loss(model, text):
    model.eval()
    losses = [model(*get_batch(text)).item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


def main(steps=6):
    torch.manual_seed(1337)
    text = torch.randint(LETTERS, (200,))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = mw.distribute(model, optimizer)
    numbers = []
    x, y = get_batch(text)
    for step in range(steps):
        if step % 3 == 0:
            numbers.append(estimate_loss(model, text))
            x, y = get_batch(text)
        for _ in range(2):
            loss = model(x, y) / 2
            x, y = get_batch(text)  # the next one, while the device computes
            loss.backward()
        numbers.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return numbers, model.state_dict()


if __name__ == "__main__":
    print(main()[0])
