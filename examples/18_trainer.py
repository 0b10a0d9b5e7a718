"""transformers' Trainer: one line between the Trainer and its `train()`. `per_device_…` then means all devices.

python examples/18_trainer.py
meshwise run --devices 2xcpu examples/18_trainer.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import meshwise as mw

torch.manual_seed(0)
rows = [{"input_ids": counting, "labels": counting} for n in range(83) for counting in [torch.arange(12) + n % 40]]
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
arguments = TrainingArguments(
    "checkpoints",
    num_train_epochs=1,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=32,
    learning_rate=3e-3,
    logging_steps=2,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, eval_dataset=rows[:50])

trainer = mw.distribute(trainer)
trainer.train()

mw.print(f"validation loss {trainer.evaluate()['eval_loss']:.6f}")
mw.save(trainer.model.state_dict(), "model.pt")
