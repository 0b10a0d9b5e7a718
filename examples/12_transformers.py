"""Fine-tune a model of Hugging Face Transformers: a token mean, its number of tokens, a warm-up, an evaluation.

python examples/12_transformers.py                                   on one device
meshwise run --devices 2xcpu examples/12_transformers.py             on two: the same numbers
meshwise run --set shard=2 --devices 2xcpu examples/12_transformers.py     parameters divided over two devices

The model is made here, small and untrained, so that nothing is downloaded; `from_pretrained` takes its place. A
download belongs under `with mw.main_first():`, so that rank 0 fills the cache and the others read it.
"""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import meshwise as mw

PAD = 0
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def sentences(count: int) -> list[torch.Tensor]:
    """Counting sentences of 5 to 20 tokens: each token is the one before it plus one."""
    starts = torch.randint(1, 40, (count,)).tolist()
    return [torch.arange(start, start + 5 + n % 16) for n, start in enumerate(starts)]


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


train = DataLoader(sentences(203), batch_size=16, shuffle=True, collate_fn=padded)  # type: ignore[arg-type]
val = DataLoader(sentences(50), batch_size=16, collate_fn=padded)  # type: ignore[arg-type]
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=None)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
with mw.main_first():
    model = GPT2LMHeadModel(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 5, 39)
model, optimizer, scheduler, train, val = mw.distribute(model, optimizer, scheduler, train, val)


def mean_loss(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss of the tokens that are not padding, and how many there are."""
    rows = rows.to(device)
    labels = rows.masked_fill(rows == PAD, -100)
    return model(input_ids=rows, attention_mask=(rows != PAD).long(), labels=labels).loss, (labels[:, 1:] >= 0).sum()


for epoch in range(3):
    model.train()
    for rows in train:
        loss, _ = mean_loss(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    total, count = 0.0, 0
    for rows in val:
        with torch.no_grad():
            loss, tokens = mean_loss(rows)
        total += loss.item() * tokens.item()
        count += tokens.item()
    print(f"epoch {epoch + 1}  train loss {loss.item():.4f}  validation loss {total / count:.4f} of {count} tokens")
torch.save(model.state_dict(), "gpt2.pt")
