"""Operators of torchvision in Python, where its C++ does not load: PyPI's wheel needs CUDA's libraries."""

from __future__ import annotations

import importlib
from importlib import metadata

import torch
from torch import Tensor

KEPT = list[torch.library.Library]()


def complete() -> None:
    """Declare what `import torchvision` looks for, where torch has no CUDA and torchvision is not built without."""
    try:
        built = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return
    if KEPT or torch.version.cuda is not None or built.endswith("+cpu"):
        return
    KEPT.append(torch.library.Library("torchvision", "FRAGMENT"))
    KEPT[0].define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT[0].define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT[0].impl("nms", non_maximum_suppression, "CPU")
    importlib.import_module("torchvision.ops.boxes")._assert_has_ops = lambda: None


def non_maximum_suppression(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Indices of the boxes that stay, best first."""
    order, kept = scores.argsort(descending=True, stable=True), list[Tensor]()
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[order, :2])
        shared = (torch.minimum(boxes[best, 2:], boxes[order, 2:]) - low).clamp(min=0).prod(1)
        order = order[shared / (areas[best] + areas[order] - shared) <= threshold]
    return torch.stack(kept) if kept else torch.zeros(0, dtype=torch.long)
