"""Programs of two ranks over NCCL, as people write them; right as they stand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def group() -> Iterator[tuple[int, torch.device]]:
    """The process group of two ranks, and this rank's device."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    yield rank, device
    torch.cuda.synchronize()
    dist.destroy_process_group()


def show(*tensors: torch.Tensor) -> None:
    """Print the sum of each."""
    print(*(float(tensor.detach().double().sum()) for tensor in tensors))


def mlp(width: int = 64, layers: int = 3) -> nn.Sequential:
    """A few blocks and a head."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def train(
    model: nn.Module, device: torch.device, steps: int = 3, accumulate: Callable[[], object] | None = None
) -> None:
    """Some steps; every other one only adds up where `accumulate` says how."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(device.index)
    for step in range(steps):
        x = torch.randn(8, 64).pin_memory().to(device, non_blocking=True)
        with accumulate() if accumulate is not None and step % 2 == 0 else nullcontext():
            loss = model(x).square().mean()
            loss.backward()
        print(loss.item())
        if accumulate is None or step % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            show(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def ddp() -> None:
    """ranks: 2. Small buckets."""
    with group() as (rank, device):
        train(DistributedDataParallel(mlp().to(device), device_ids=[rank], bucket_cap_mb=0.01), device)


def ddp_bucket_views() -> None:
    """ranks: 2. Gradients are views of the buckets, the graph is static."""
    with group() as (_rank, device):
        model = DistributedDataParallel(mlp().to(device), gradient_as_bucket_view=True, static_graph=True)
        train(model, device)


def ddp_accumulates() -> None:
    """ranks: 2. no_sync."""
    with group() as (rank, device):
        model = DistributedDataParallel(mlp().to(device), device_ids=[rank])
        train(model, device, 4, model.no_sync)


def ddp_unused() -> None:
    """ranks: 2. Parameters that a step leaves out."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) if x.sum() > 0 else self.second(x)

    with group() as (_rank, device):
        train(DistributedDataParallel(Either().to(device), find_unused_parameters=True), device)


def ddp_compressed() -> None:
    """ranks: 2. A hook sends float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    with group() as (rank, device):
        model = DistributedDataParallel(mlp().to(device), device_ids=[rank], bucket_cap_mb=0.01)
        model.register_comm_hook(None, fp16_compress_hook)
        train(model, device)


def ddp_own_hook() -> None:
    """ranks: 2. A hook of the user's, in Python, that goes on in the future's stream."""

    def hook(state, bucket):
        tensor = bucket.buffer().div_(2)
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0].mul_(1.0))

    with group() as (rank, device):
        model = DistributedDataParallel(mlp().to(device), device_ids=[rank], bucket_cap_mb=0.01)
        model.register_comm_hook(None, hook)
        train(model, device)


def ddp_with_batch_norm() -> None:
    """ranks: 2. Buffers are broadcast, statistics are those of all ranks."""
    with group() as (_rank, device):
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
        train(DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device)), device)


def ddp_in_half() -> None:
    """ranks: 2. Autocast."""
    with group() as (rank, device):
        model = DistributedDataParallel(mlp().to(device), device_ids=[rank])
        model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)
        train(model, device)


def ddp_uneven() -> None:
    """ranks: 2. Ranks with batches of their own number."""
    with group() as (rank, device):
        model = DistributedDataParallel(mlp().to(device), device_ids=[rank])
        with model.join():
            for step in range(2 + rank):
                model(torch.full((4, 64), step + 1.0, device=device)).square().mean().backward()
        show(*(p.grad for p in model.parameters()))


def zero_redundancy() -> None:
    """ranks: 2. Each rank steps a part of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with group() as (rank, device):
        model = DistributedDataParallel(mlp().to(device), device_ids=[rank])
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        for step in range(3):
            model(torch.full((4, 64), step + 1.0, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        show(*model.parameters())


def sharded(model: nn.Module, **options: object) -> nn.Module:
    """fully_shard of each block and of the whole."""
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp2() -> None:
    """ranks: 2."""
    with group() as (_rank, device):
        train(sharded(mlp().to(device)), device)


def fsdp2_keeps() -> None:
    """ranks: 2. Parameters stay whole after the forward."""
    with group() as (_rank, device):
        train(sharded(mlp().to(device), reshard_after_forward=False), device)


def fsdp2_in_half() -> None:
    """ranks: 2. bfloat16, gradients in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    with group() as (_rank, device):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        train(sharded(mlp().to(device), mp_policy=policy), device)


def fsdp2_on_the_host() -> None:
    """ranks: 2. Parameters wait in pinned memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    with group() as (_rank, device):
        model = sharded(mlp(), offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for step in range(3):
            loss = model(torch.full((4, 64), step + 1.0, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())


def fsdp2_ahead() -> None:
    """ranks: 2. Blocks are gathered two ahead."""
    with group() as (_rank, device):
        model = sharded(mlp(layers=5).to(device))
        blocks = list(model)
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, number - 2) : number][::-1])
        train(model, device)


def fsdp2_accumulates() -> None:
    """ranks: 2. Gradients are reduced every second time."""
    with group() as (_rank, device):
        model = sharded(mlp().to(device))

        @contextmanager
        def adds_up() -> Iterator[None]:
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

        train(model, device, 4, adds_up)


def fsdp2_recomputed() -> None:
    """ranks: 2. Blocks run again in the backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    with group() as (_rank, device):
        model = mlp().to(device)
        apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, nn.Sequential) and len(module) == 2
        )
        train(sharded(model), device)


def fsdp2_saved() -> None:
    """ranks: 2. A state that all ranks write, and read again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    with group() as (_rank, device):
        model = sharded(mlp().to(device))
        train(model, device, 2)
        state = get_model_state_dict(model)
        dcp.save(state, checkpoint_id="saved")
        dcp.load(state, checkpoint_id="saved")
        set_model_state_dict(model, state)
        train(model, device, 1)


def tensor_parallel() -> None:
    """ranks: 2. A column-wise and a row-wise layer."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with group() as (_rank, device):
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(model, init_device_mesh("cuda", (2,)), plan)
        train(model, device)


def pipeline() -> None:
    """ranks: 2. Two stages, four microbatches, one forward and one backward by turns."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    with group() as (rank, device):
        stage = PipelineStage((mlp().to(device)[:2] if rank == 0 else mlp().to(device)[2:]), rank, 2, device)
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, y: (out - y).square().mean())
        for step in range(2):
            x, losses = torch.full((16, 64), step + 1.0, device=device), list[torch.Tensor]()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=torch.zeros(16, 1, device=device), losses=losses)
        show(*(p.grad for p in stage.submod.parameters()))


def collectives() -> None:
    """ranks: 2. One after the other, each waited for."""
    with group() as (rank, device):
        x = torch.arange(8.0, device=device) + rank
        dist.all_reduce(x)
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x * (rank + 1))
        whole = torch.empty(16, device=device)
        dist.all_gather_into_tensor(whole, parts[rank])
        half = torch.empty(8, device=device)
        dist.reduce_scatter_tensor(half, whole)
        dist.broadcast(half, 1)
        other = torch.empty_like(half)
        dist.all_to_all_single(other, half)
        dist.reduce(other, 0)
        show(x, *parts, whole, half, other)
        dist.barrier()


def collectives_beside() -> None:
    """ranks: 2. Begun, with work beside them, then waited for."""
    with group() as (rank, device):
        x, y = torch.ones(1 << 16, device=device) * (rank + 1), torch.ones(1 << 16, device=device)
        for _ in range(3):
            work = dist.all_reduce(x, async_op=True)
            y = y * 1.5 + 1
            work.wait()
            x = x / 2 + y
            gathered = torch.empty(2 << 16, device=device)
            work = dist.all_gather_into_tensor(gathered, y, async_op=True)
            z = y.sum()
            work.wait()
            show(x, gathered, z)


def collective_from_a_side_stream() -> None:
    """ranks: 2. Begun and waited for on a stream of the user's."""
    with group() as (rank, device):
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        for step in range(3):
            x = torch.full((1 << 16,), step + rank + 1.0, device=device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                dist.all_reduce(x, async_op=True).wait()
                x.mul_(2)
            main.wait_stream(side)
            show(x)


def sends() -> None:
    """ranks: 2. One sends, the other receives, and both at once."""
    with group() as (rank, device):
        x, y = torch.full((1 << 12,), rank + 1.0, device=device), torch.empty(1 << 12, device=device)
        if rank == 0:
            dist.send(x, 1)
            dist.recv(y, 1)
        else:
            dist.recv(y, 0)
            dist.send(x * 2, 0)
        show(y)
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
        for _ in range(2):
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            show(y)
            x.add_(y)


def functional() -> None:
    """ranks: 2. Collectives that give new tensors, which wait where they are used."""
    import torch.distributed._functional_collectives as of

    with group() as (rank, device):
        x = torch.full((64,), rank + 1.0, device=device)
        total = of.all_reduce(x, "sum", dist.group.WORLD)
        both = of.all_gather_tensor(x * 2, 0, dist.group.WORLD)
        show(total + 1, both * 3, of.reduce_scatter_tensor(both + 0, "sum", 0, dist.group.WORLD) + 0)


def dtensors() -> None:
    """ranks: 2. Redistributed, and multiplied."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with group() as (_rank, device):
        mesh = init_device_mesh("cuda", (2,))
        a = distribute_tensor(torch.arange(64.0, device=device).view(8, 8), mesh, [Shard(0)])
        b = a.redistribute(mesh, [Shard(1)])
        c = (a @ b).redistribute(mesh, [Replicate()])
        show(c.to_local(), b.full_tensor())


def gradients_by_hand() -> None:
    """ranks: 2. Each gradient is summed as soon as it is there."""
    with group() as (rank, device):
        model, works = mlp().to(device), list[dist.Work]()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def begin(parameter: nn.Parameter) -> None:
            parameter.grad.div_(2)
            works.append(dist.all_reduce(parameter.grad, async_op=True))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(begin)
        for step in range(3):
            loss = model(torch.full((4, 64), step + rank + 1.0, device=device)).square().mean()
            loss.backward()
            for work in works:
                work.wait()
            works.clear()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())


def accelerated(**options: object) -> None:
    """The loop of accelerate's examples."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(**options)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 1))
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(float(accelerator.gather_for_metrics(loss.detach()).mean()))
    accelerator.end_training()


def accelerate_ddp() -> None:
    """ranks: 2."""
    accelerated()


def accelerate_accumulates() -> None:
    """ranks: 2."""
    accelerated(gradient_accumulation_steps=2)


def accelerate_in_half() -> None:
    """ranks: 2."""
    accelerated(mixed_precision="bf16")


def accelerate_fsdp2() -> None:
    """ranks: 2."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerated(fsdp_plugin=plugin)


def accelerate_alone() -> None:
    """On one device."""
    accelerated()
