"""Small programs that use streams, events and pinned memory as people do; right as they stand."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn

SIZE = 1 << 18


def show(*tensors: torch.Tensor) -> None:
    """Print the sum of each."""
    print(*(float(tensor.double().sum()) for tensor in tensors))


def side_stream() -> None:
    """Work on a side stream, joined again."""
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    total = torch.zeros(SIZE, device="cuda")
    for step in range(4):
        x = torch.full((SIZE,), float(step), device="cuda")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x * 3 + 1
        main.wait_stream(side)
        total += y
        x.record_stream(side)
        y.record_stream(main)
        show(total)


def two_events() -> None:
    """A producer and a consumer that go by turns over one buffer."""
    produce, consume = torch.cuda.Stream(), torch.cuda.Stream()
    filled, emptied = torch.cuda.Event(), torch.cuda.Event()
    buffer, total = torch.zeros(SIZE, device="cuda"), torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    for step in range(5):
        with torch.cuda.stream(produce):
            produce.wait_event(emptied)
            buffer.fill_(step)
            buffer.mul_(2)
            filled.record(produce)
        with torch.cuda.stream(consume):
            consume.wait_event(filled)
            total.add_(buffer)
            emptied.record(consume)
    consume.synchronize()
    show(total)


def two_buffers() -> None:
    """Two pinned buffers by turns: each is filled again once its copy is done."""
    stream, events = torch.cuda.Stream(), [torch.cuda.Event(), torch.cuda.Event()]
    buffers = [torch.zeros(SIZE, pin_memory=True) for _ in range(2)]
    there = [torch.zeros(SIZE, device="cuda") for _ in range(2)]
    total = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    for step in range(6):
        which = step % 2
        events[which].synchronize()
        buffers[which].fill_(step + 0.5)
        with torch.cuda.stream(stream):
            there[which].copy_(buffers[which], non_blocking=True)
            total.add_(there[which])
            events[which].record(stream)
    stream.synchronize()
    show(total)


def loss_is_read_late() -> None:
    """A loss goes to the host without waiting, and is read after its event."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    host, event = torch.zeros((), pin_memory=True), torch.cuda.Event()
    for step in range(4):
        loss = model(torch.ones(8, 64, device="cuda") * step).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        host.copy_(loss.detach(), non_blocking=True)
        event.record()
        event.synchronize()
        print(host.item())


def results_to_numpy() -> None:
    """Results go to pinned memory on a stream of their own."""
    stream, ready = torch.cuda.Stream(), torch.cuda.Event()
    for step in range(3):
        result = torch.arange(SIZE, device="cuda").float() * step
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host = result.to("cpu", non_blocking=True)
            result.record_stream(stream)
            ready.record()
        ready.synchronize()
        print(float(host.numpy().sum(dtype="float64")), host.tolist()[:3])


def a_thread_reads() -> None:
    """A thread waits for the copy and takes the numbers."""
    done, results = queue.Queue[tuple[torch.cuda.Event, torch.Tensor]](), list[float]()

    def read() -> None:
        for _ in range(4):
            event, host = done.get()
            event.synchronize()
            results.append(float(host.double().sum()))

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(4):
        value = torch.full((SIZE,), float(step), device="cuda") + 0.25
        host, event = torch.empty(SIZE, pin_memory=True), torch.cuda.Event()
        host.copy_(value, non_blocking=True)
        event.record()
        done.put((event, host))
    thread.join()
    print(results)


def a_pool_of_threads() -> None:
    """Each thread has its own stream."""

    def work(number: int) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.full((SIZE,), float(number), device="cuda")
            y = (x * 2).sum()
            stream.synchronize()
            return y.item()

    with ThreadPoolExecutor(3) as pool:
        print(list(pool.map(work, range(5))))


def polled() -> None:
    """The host asks an event whether it is over, until it is."""
    host, event = torch.zeros(SIZE, pin_memory=True), torch.cuda.Event()
    host.copy_(torch.full((SIZE,), 3.0, device="cuda"), non_blocking=True)
    event.record()
    while not event.query():
        pass
    print(float(host.sum()))


def columns() -> None:
    """Two streams write the two halves of each row of one matrix."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    whole = torch.zeros(512, 512, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        whole[:, 256:].fill_(2)
        whole[:, 256:].mul_(3)
    whole[:, :256].fill_(1)
    whole[:, :256].mul_(5)
    main.wait_stream(side)
    show(whole)


def slices() -> None:
    """Three streams, each its own slice of a flat buffer; then the whole is read."""
    main, sides = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(3)]
    flat = torch.zeros(3 * SIZE, device="cuda")
    for number, side in enumerate(sides):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            part = flat[number * SIZE : (number + 1) * SIZE]
            part.fill_(number)
            part.add_(1)
    for side in sides:
        main.wait_stream(side)
    show(flat, flat.view(3, -1)[1])


def two_devices() -> None:
    """A pipeline of two devices, by copies of torch's own."""
    first, second = nn.Linear(64, 64).to("cuda:0"), nn.Linear(64, 64).to("cuda:1")
    with torch.no_grad():
        for layer in (first, second):
            layer.weight.fill_(0.01)
            layer.bias.fill_(0.1)
    for step in range(3):
        x = torch.full((8, 64), float(step), device="cuda:0")
        y = second(first(x).to("cuda:1", non_blocking=True))
        y.sum().backward()
        show(y, first.weight.grad)


def peer_streams() -> None:
    """A stream of one device waits for an event of another."""
    here, there = torch.cuda.Stream("cuda:0"), torch.cuda.Stream("cuda:1")
    total = torch.zeros(SIZE, device="cuda:1")
    torch.cuda.synchronize("cuda:1")
    event, used = torch.cuda.Event(), torch.cuda.Event()
    host = torch.zeros(SIZE, pin_memory=True)
    for step in range(4):
        with torch.cuda.stream(here):
            here.wait_event(used)
            host.copy_(torch.full((SIZE,), float(step), device="cuda:0"), non_blocking=True)
            event.record(here)
        with torch.cuda.stream(there):
            there.wait_event(event)
            total.add_(host.to("cuda:1", non_blocking=True))
            used.record(there)
    there.synchronize()
    show(total)


def loader_with_pinned_memory() -> None:
    """A DataLoader whose thread pins, and copies that do not wait."""
    data = torch.utils.data.TensorDataset(torch.arange(64.0).view(64, 1), torch.arange(64))
    total = torch.zeros((), device="cuda")
    for x, y in torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True):
        total += (x.cuda(non_blocking=True) * y.cuda(non_blocking=True)).sum()
    print(total.item())


def prefetcher() -> None:
    """The prefetcher of NVIDIA's examples: the next batch is copied on a side stream."""
    batches = [torch.full((SIZE,), float(step)).pin_memory() for step in range(6)]
    stream, total = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda")

    def begin(index: int) -> torch.Tensor | None:
        if index >= len(batches):
            return None
        with torch.cuda.stream(stream):
            there = batches[index].cuda(non_blocking=True)
            there = there.float().div_(2)
        return there

    ahead, index = begin(0), 0
    while ahead is not None:
        torch.cuda.current_stream().wait_stream(stream)
        now = ahead
        now.record_stream(torch.cuda.current_stream())
        index += 1
        ahead = begin(index)
        total += now
        del now
    show(total)


def training_on_a_side_stream() -> None:
    """A whole training on a stream that is not the default one."""
    torch.manual_seed(0)
    stream = torch.cuda.Stream()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(4):
            loss = model(torch.full((16, 32), step + 1.0, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
    torch.cuda.current_stream().wait_stream(stream)
    show(model[0].weight.detach())


def branches() -> None:
    """Two branches of a model on two streams, and a backward through both."""
    torch.manual_seed(0)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    left, right = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
    for step in range(3):
        x = torch.full((8, 64), step + 1.0, device="cuda")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            b = right(x).tanh()
        a = left(x).tanh()
        main.wait_stream(side)
        loss = (a * b).sum()
        loss.backward()
        torch.cuda.synchronize()
        show(loss.detach(), left.weight.grad, right.weight.grad)


def running_copy() -> None:
    """An average of the weights, kept on a side stream beside the next step."""
    torch.manual_seed(0)
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    model = nn.Linear(64, 64).cuda()
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        loss = model(torch.ones(8, 64, device="cuda")).square().mean()
        loss.backward()
        torch.cuda.current_stream().wait_event(done)
        optimizer.step()
        optimizer.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.5)
            done.record()
    torch.cuda.current_stream().wait_stream(side)
    show(*average)


def plain_mlp() -> None:
    """A training as most are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(3):
        loss = F.cross_entropy(model(torch.randn(16, 32, device="cuda")), torch.arange(16, device="cuda") % 10)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())


def plain_cnn() -> None:
    """Convolutions, batch norm, evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, y = torch.randn(8, 3, 16, 16).cuda(), (torch.arange(8) % 4).cuda()
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(loss.item(), (model(x).argmax(1) == y).sum().item())


def scaled_loss() -> None:
    """float16 with a GradScaler."""
    torch.manual_seed(0)
    model, scaler = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.ones(16, 32, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(loss.item())


def recomputed() -> None:
    """A block runs again in the backward, with dropout."""
    torch.manual_seed(0)
    block, head = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU()).cuda(), nn.Linear(64, 1).cuda()
    for _ in range(3):
        x = torch.ones(8, 64, device="cuda", requires_grad=True)
        loss = head(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)).sum()
        loss.backward()
        show(loss.detach(), block[0].weight.grad)


def saved_on_cpu() -> None:
    """What the backward needs lies on the host, pinned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()).cuda()
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = model(torch.ones(8, 64, device="cuda")).square().sum()
        loss.backward()
        show(loss.detach(), model[0].weight.grad)


def generated() -> None:
    """Tokens one by one into a cache of keys and values."""
    torch.manual_seed(0)
    cache, weight = torch.zeros(2, 40, 16, device="cuda"), torch.randn(16, 16, device="cuda") / 4
    x = torch.ones(2, 16, device="cuda")
    for at in range(40):
        cache[:, at] = x @ weight
        x = (
            torch.softmax(torch.einsum("bd,btd->bt", x, cache[:, : at + 1]), 1)
            .unsqueeze(1)
            .bmm(cache[:, : at + 1])[:, 0]
        )
    show(x, cache)


def memory_goes_back() -> None:
    """The cache is emptied between two sizes, on two streams."""
    side = torch.cuda.Stream()
    for size in (SIZE, 4 * SIZE, 2 * SIZE):
        x = torch.ones(size, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        show(y)
        del x, y
        torch.cuda.empty_cache()


def saved_and_loaded() -> None:
    """A state that went to pinned memory, saved and loaded."""
    model = nn.Linear(64, 64).cuda()
    with torch.no_grad():
        model.weight.fill_(0.5)
    host = {name: value.to("cpu", non_blocking=True) for name, value in model.state_dict().items()}
    torch.cuda.current_stream().synchronize()
    torch.save(host, "state.pt")
    model.load_state_dict(torch.load("state.pt"))
    show(model.weight.detach())


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Rows of a table, made in the loader's processes."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), float(index))


def loader_with_processes() -> None:
    """A DataLoader with processes of its own, forked once the devices are used."""
    total = torch.zeros(16, device="cuda")
    for rows in torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork"):
        total += rows.cuda(non_blocking=True).sum(0)
    show(total)
