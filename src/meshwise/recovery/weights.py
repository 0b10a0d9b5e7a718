"""Final weights as safetensors, which plain PyTorch, and anything else, loads without us."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save
from torch import nn

from meshwise.records.atomic import write_with


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the model's state_dict. Tensors that share memory (tied weights) are written once under each name."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    write_with(path, lambda file: file.write(save(tensors, metadata={"format": "pt"})))
