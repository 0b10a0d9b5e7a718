"""The jobs of job_with_state.py, and a script, for what is done to processes from outside: each loader worker, and each
child with a session of its own, leaves its number in FAULT_OUT. FAULT_RANK is the rank that has the fault."""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import job_with_state
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import meshwise as mw

DAMAGED = 77


def mine():
    """Whether this process belongs to the rank that has the fault."""
    return os.environ.get("RANK", "0") == os.environ.get("FAULT_RANK")


def note(name, number):
    file = Path(os.environ["FAULT_OUT"], name)
    file.with_suffix(".part").write_text(str(number))
    file.with_suffix(".part").rename(file)


class Rows(Dataset):
    """Read one by one."""

    def __init__(self, damaged=False):
        self.damaged = damaged
        self.x, self.noted = job_with_state.x, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if get_worker_info() is not None and mine() and self.noted != os.getpid():
            self.noted = os.getpid()
            note("loader", self.noted)
        if self.damaged and index == DAMAGED:
            raise ValueError(f"record {index} is damaged:\nno such class")
        return self.x[index], self.x[index].sum(0, keepdim=True)


def with_child(build):
    """A builder of models that starts a child with a session of its own, once."""

    def built():
        if mine() and not Path(os.environ["FAULT_OUT"], "child").exists():
            child = subprocess.Popen(["sleep", "300"], start_new_session=True)
            note("child", child.pid)
        return build()

    return built


for _name in ("job", "blocks"):
    _job = getattr(job_with_state, _name)
    globals()[f"{_name}_loader"] = replace(_job, data=Rows, loader_workers=1)
    globals()[f"{_name}_damaged"] = replace(_job, data=lambda: Rows(damaged=True), loader_workers=1)
    globals()[f"{_name}_child"] = replace(_job, model=with_child(_job.model))


def train():
    """A loop of one's own that saves no state, and takes its time from its eighth step on."""
    torch.manual_seed(0)
    model = job_with_state.model_of_blocks()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = mw.distribute(model, optimizer, DataLoader(Rows(), 16, num_workers=1))
    for _ in range(2):
        for step, batch in enumerate(loader, start=1):
            mw.backward(job_with_state.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if step >= 8:
                note(f"now-{mw.rank()}", step)
                time.sleep(0.3)


if __name__ == "__main__":
    train()
