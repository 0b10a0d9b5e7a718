"""torch.nn.SyncBatchNorm, which has no form for CPUs: on two GPUs it is the BatchNorm of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import meshwise as mw
from tests.cuda.jobs import Images, pictures

pytestmark = pytest.mark.evidence(
    "`torch.nn.SyncBatchNorm`, under DDP and under the line, is the batch norm of one device"
)


def images() -> nn.Module:
    torch.manual_seed(0)
    model = Images()
    model.norm2 = nn.BatchNorm2d(16, affine=False, momentum=0.3)
    return model.double()


def trained(model: nn.Module, part: slice, device: str, whole: int) -> dict[str, Tensor]:
    """Its state after three steps on this part of each batch, of which gradients are summed over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = (each.to(device) for each in pictures(24))
    for batch in range(0, 24, 8):
        logits = model(x[batch : batch + 8][part].double())
        loss = nn.functional.cross_entropy(logits, y[batch : batch + 8][part], reduction="sum")
        (loss * whole / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): value.cpu() for name, value in model.state_dict().items()}


def under_ddp() -> dict[str, Tensor]:
    """DDP takes the mean over the ranks; the second one has fewer rows."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(images()).cuda()
    part = slice(0, 5) if mw.rank() == 0 else slice(5, 8)
    return trained(DistributedDataParallel(model), part, "cuda", mw.world_size())


def test_under_ddp_it_is_the_batch_norm_of_one_device(gpus: Any) -> None:
    want = trained(images(), slice(None), "cpu", 1)
    for got in gpus(2).run(under_ddp):
        assert got.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)


def under_mw() -> dict[str, Tensor]:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(images()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*pictures(24)), batch_size=8)
    model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
    for x, y in loader:
        mw.backward(nn.functional.cross_entropy(model(x.double()), y))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in model.state_dict().items()}


def test_under_mw_distribute_it_is_the_batch_norm_of_one_device(gpus: Any) -> None:
    want = trained(images(), slice(None), "cpu", 1)
    for got in gpus(2).run(under_mw):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)


def in_half() -> list[Tensor]:
    """Of two ranks' images in half precision, under weights of 32 bits: what comes out, and the gradients."""
    norm = nn.SyncBatchNorm(3).cuda()
    x = pictures(8)[0][4 * mw.rank() :][:4].half().cuda().requires_grad_()
    out = norm(x)
    out.backward(out.detach().square())
    return [each.cpu() for each in (out.detach(), x.grad, norm.weight.grad, norm.bias.grad, norm.running_var)]


def test_statistics_of_half_precision_are_kept_in_32_bits(gpus: Any) -> None:
    norm, x = nn.BatchNorm2d(3), pictures(8)[0].half().float().requires_grad_()
    out = norm(x)
    out.backward(out.detach().half().square().float())
    first, second = gpus(2).run(in_half)
    assert first[0].dtype == first[1].dtype == torch.half and first[4].dtype == torch.float32
    torch.testing.assert_close(torch.cat([first[0], second[0]]).float(), out.detach(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.cat([first[1], second[1]]).float(), x.grad, rtol=1e-2, atol=1e-2)
    for a, b, whole in zip(first[2:4], second[2:4], (norm.weight.grad, norm.bias.grad), strict=True):
        torch.testing.assert_close(a + b, whole, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(first[4], norm.running_var)
