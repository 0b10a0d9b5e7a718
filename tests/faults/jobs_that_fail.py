"""Small jobs that fail in one way each, on rank 1 in step 5 unless they say otherwise."""

import ctypes
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import meshwise as mw

STEP = int(os.environ.get("FAIL_STEP", "5"))
calls = {"loss": 0}


def make(fail, samples=4000, epochs=50, pause=0.002):
    def loss(model, batch):
        calls["loss"] += 1
        time.sleep(pause)
        value = nn.functional.mse_loss(model(batch[0]), batch[1])
        if mw.rank() == 1 and calls["loss"] == STEP:
            if "FAULT_STAMP" in os.environ:
                Path(os.environ["FAULT_STAMP"]).write_text(str(time.time()))
            changed = fail(value)
            value = value if changed is None else changed
        return value

    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
    return mw.Job(
        name="failing",
        model=lambda: nn.Linear(4, 1),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        data=lambda: (x, x.sum(1, keepdim=True)),
        batch_size=8,
        epochs=epochs,
    )


def raises(value):
    raise ValueError("the planted fault")


def is_killed(value):
    os.kill(os.getpid(), signal.SIGKILL)


def exits(value):
    sys.exit(0)


def exits_at_once(value):
    os._exit(0)


def exits_in_c(value):
    ctypes.CDLL(None).exit(0)


def runs_out_of_memory(value):
    torch.empty(2**60, dtype=torch.uint8)


def is_not_a_number(value):
    return value * float("nan")


def wrong_shape(value):
    return torch.stack([value, value])


def is_stopped(value):
    os.kill(os.getpid(), signal.SIGSTOP)


def leaves_others_in_a_collective(value):
    time.sleep(1.0)  # the other rank is inside the all-reduce by now
    os._exit(0)


job_raises = make(raises)
job_is_killed = make(is_killed)
job_is_stopped = make(is_stopped)
job_exits = make(exits)
job_exits_everywhere = mw.Job(**{**vars(job_exits), "loss": lambda model, batch: sys.exit(0)})
job_exits_at_once = make(exits_at_once)
job_exits_in_c = make(exits_in_c)
job_out_of_memory = make(runs_out_of_memory)
job_not_a_number = make(is_not_a_number)
job_wrong_shape = make(wrong_shape)
job_leaves_others = make(leaves_others_in_a_collective)
job_fine = make(lambda value: None, epochs=2, pause=0.0)
job_long = make(lambda value: None, epochs=1000)
job_long_with_loader_workers = dataclasses.replace(job_long, loader_workers=1)
