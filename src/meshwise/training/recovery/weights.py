"""Write final weights as safetensors.

Plain PyTorch, or any other program, can load these files without meshwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from meshwise.records.claims import write_of
from meshwise.training.recovery.collect import collected, state_of
from meshwise.workers.environment import attempt


def save_weights(model: nn.Module, path: Path, header: Mapping[str, str] | None = None) -> None:
    """Write the model's state_dict with whole tensors to `path`, on rank 0."""
    state = collected(state_of(model))
    if state is not None:
        double = torch.complex128  # safetensors does not support complex128
        tensors = {
            n: (t.to(torch.complex64) if t.dtype is double else t).clone(memory_format=torch.contiguous_format)
            for n, t in state.items()
        }
        content = save(tensors, metadata={"format": "pt", **(header or {})})
        write_of(path.parent, attempt(), path, lambda file: file.write(content))
