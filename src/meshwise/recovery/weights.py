"""Final weights as safetensors, which plain PyTorch, and anything else, loads without us."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import nn

from meshwise.records.files import write_with
from meshwise.recovery.collect import collected, state_of


def save_weights(model: nn.Module, path: Path, header: Mapping[str, str] | None = None) -> None:
    """Write the model's state_dict on rank 0, whole under any plan. Collective.

    header: what the file says beside its tensors. Tensors that share memory (tied weights) are written once under each
    name.
    """
    state = collected(state_of(model))
    if state is not None:
        tensors = {name: tensor.contiguous().clone() for name, tensor in state.items()}
        write_with(path, lambda file: file.write(save(tensors, metadata={"format": "pt", **(header or {})})))
