"""Races between streams on the fake CUDA: what is told of programs that lack a wait, and of those that lack none.

Of checker/races/watch.py and torch_compat/gpu_trace.py. bench/races.py has more of both.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WHAT = "races between streams, and of the host, are told by line, in programs and in `check --perturb`"
pytestmark = pytest.mark.evidence(WHAT, rung="R3")

Run = Callable[..., Any]

EACH = """
import json, sys, threading, torch
from concurrent.futures import ThreadPoolExecutor
from safetensors.torch import save_file
from meshwise.checker.races.watch import find_races

pool = ThreadPoolExecutor(1)
pool.submit(int).result()
for file in sys.argv[1:]:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    names = {"torch": torch, "threading": threading, "main": main, "side": side, "event": torch.cuda.Event()}
    names |= {"x": torch.zeros(4096, device="cuda"), "host": torch.zeros(4096, pin_memory=True)}
    names |= {"on_side": lambda: torch.cuda.stream(side), "pool": pool, "save_file": save_file}
    torch.cuda.synchronize()
    with find_races(lambda finding: None) as found:
        exec(compile(open(file).read(), file, "exec"), names)
    print("@", json.dumps([each.sentence for each in found]))
    names.clear()
"""
# A line that ends with `# here` is one of the two that are told.
RACES = {
    "a stream reads what another writes": """
x.add_(1)  # here
with on_side():
    y = x * 2  # here
""",
    "a stream writes what another reads": """
with on_side():
    y = x * 2  # here
x.add_(1)  # here
""",
    "an event that comes before what it is waited for": """
event.record()
x.add_(1)  # here
side.wait_event(event)
with on_side():
    y = x * 2  # here
""",
    "part of a tensor": """
side.wait_stream(main)
with on_side():
    x[:100].add_(1)  # here
x[99:].add_(1)  # here
""",
    "columns that overlap": """
m = x.view(64, 64)
side.wait_stream(main)
with on_side():
    m[:, :33].add_(1)  # here
m[:, 32:].add_(1)  # here
""",
    "the default streams of two devices": """
other = torch.cuda.default_stream("cuda:1")
host.copy_(x, non_blocking=True)  # here
y = host.to("cuda:1", non_blocking=True)  # here
""",
    "pinned memory is read by the host": """
host.copy_(x, non_blocking=True)  # here
print(host[0].item())  # here
""",
    "pinned memory goes to NumPy": """
y = x.to("cpu", non_blocking=True)  # here
y.numpy()  # here
""",
    "pinned memory is written by the host": """
x.copy_(host, non_blocking=True)  # here
host.fill_(1)  # here
""",
    "a NumPy view is read": """
view = host.numpy()
host.copy_(x, non_blocking=True)  # here
print(view[1:].mean())  # here
""",
    "a NumPy view is written": """
view = host.numpy()
x.copy_(host, non_blocking=True)  # here
view[:] = 1  # here
""",
    "a file is read into pinned memory": """
buffer = memoryview(host.numpy())
x.copy_(host, non_blocking=True)  # here
open("/dev/zero", "rb").readinto(buffer)  # here
""",
    "copies under way are saved": """
y = x.to("cpu", non_blocking=True)  # here
save_file({"y": y}, "y.safetensors")  # here
""",
    "a pool of threads that was made before": """
def work():
    with on_side():
        x.add_(1)  # here
x.mul_(2)  # here
pool.submit(work).result()
""",
    "an event that comes before the copy, and another stream, are asked": """
event = torch.Event("cuda")
event.record()
host.copy_(x, non_blocking=True)  # here
while not (event.query() and torch.Stream("cuda").query()):
    pass
host.tolist()  # here
""",
    "memory is freed while another stream uses it": """
y = torch.ones(1 << 20, device="cuda")
side.wait_stream(main)
with on_side():
    z = y * 2  # here
del y
w = torch.ones(1 << 20, device="cuda")  # here
""",
    "in a backward": """
w = torch.ones(4096, device="cuda", requires_grad=True)
w.grad = torch.zeros_like(w)
y = (w * 2).sum()
side.wait_stream(main)
with on_side():
    w.grad.add_(1)  # here
y.backward()  # here
""",
    "in a thread": """
class Work(threading.Thread):
    def run(self):
        with on_side():
            x.add_(1)  # here
x.mul_(2)  # here
thread = Work()
thread.start()
thread.join()
""",
    "a thread waits, and nobody for it": """
host.copy_(x, non_blocking=True)  # here
event.record()
thread = threading.Thread(target=event.synchronize)
thread.start()
host.tolist()  # here
thread.join()
""",
    "in what is compiled": """
double = torch.compile(lambda tensor: tensor * 2, backend="eager")  # here
x.add_(1)  # here
with on_side():
    double(x)
""",
    "the same two lines on a stream of its own each time": """
for _ in range(3):
    x.add_(1)  # here
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        y = x * 2  # here
    main.wait_stream(own)
""",
    "columns that are read by a stream, a whole that is written": """
with on_side():
    y = x.view(64, 64)[:, 3].clone()  # here
x.zero_()  # here
""",
}
CLEAN = {
    "a wait for a stream": """
x.add_(1)
side.wait_stream(main)
with on_side():
    x.mul_(2)
main.wait_stream(side)
x.add_(1)
""",
    "an event": """
x.add_(1)
event.record()
side.wait_event(event)
with on_side():
    x.mul_(2)
    event.record()
event.synchronize()
x.add_(1)
""",
    "two reads, and two halves": """
y = x * 2
with on_side():
    z = x * 2
main.wait_stream(side)
side.wait_stream(main)
with on_side():
    x[:100].add_(1)
x[100:].add_(1)
""",
    "columns of their own": """
m = x.view(64, 64)
side.wait_stream(main)
with on_side():
    m[:, :32].add_(1)
m[:, 32:].add_(1)
""",
    "an event or a stream that is asked": """
for asked in (event, torch.Event("cuda"), main, torch.accelerator.current_stream()):
    host.copy_(x, non_blocking=True)
    if hasattr(asked, "record"):
        asked.record()
    while not asked.query():
        pass
    host.tolist()
""",
    "NumPy, a file, safetensors and a pool of threads, each behind a wait": """
view = host.numpy()
host.copy_(x, non_blocking=True)
view.shape, view[1:].T, memoryview(view)
event.record()
pool.submit(event.synchronize).result()
view += view.mean()
x.copy_(host, non_blocking=True)
y = x.to("cpu", non_blocking=True)
main.synchronize()
open("/dev/zero", "rb").readinto(memoryview(view))
save_file({"y": y}, "y.safetensors")
""",
    "a copy between devices, both ways": """
y = x.to("cuda:1")
y.add_(1)
x.copy_(y)
x.add_(1)
""",
    "memory that the host does not pin": """
y = torch.zeros(4096)
y.copy_(x, non_blocking=True)
y.add_(1)
x.copy_(y, non_blocking=True)
y.zero_()
""",
    "memory that is recorded": """
for _ in range(3):
    y = torch.ones(1 << 20, device="cuda")
    side.wait_stream(main)
    with on_side():
        z = y * 2
    y.record_stream(side)
    del y
""",
    "memory that is freed before a wait": """
y = torch.ones(1 << 20, device="cuda")
side.wait_stream(main)
with on_side():
    z = y * 2
del y
main.wait_stream(side)
w = torch.ones(1 << 20, device="cuda")
""",
    "memory that went back to the device": """
y = torch.ones(1 << 20, device="cuda")
side.wait_stream(main)
with on_side():
    z = y * 2
del y
torch.cuda.empty_cache()
w = torch.ones(1 << 20, device="cuda")
""",
    "pinned memory that is given again": """
for _ in range(4):
    y = torch.ones(4096).pin_memory().to("cuda", non_blocking=True)
""",
    "a look at shapes, and views": """
with on_side():
    x.add_(1)
x.view(64, 64)[1:].t().shape, torch.empty_like(x), x.data_ptr()
""",
    "tensors without memory, and a read of the device": """
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.ones(4, device="cuda").add_(1)
with on_side():
    y = torch.ones(3, device="cuda")
    y.tolist(), y.__cuda_array_interface__
""",
    "threads that wait for each other": """
host.copy_(x, non_blocking=True)
event.record()
thread = threading.Thread(target=event.synchronize)
thread.start()
thread.join()
host.tolist()
""",
}


def told(python: Run, folder: Path, programs: dict[str, str]) -> dict[str, list[str]]:
    """What is found in each program, which lies in `0.py`, `1.py` and so on."""
    for number, text in enumerate(programs.values()):
        (folder / f"{number}.py").write_text(text)
    done = python("-c", EACH, *(f"{number}.py" for number in range(len(programs))))
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    return dict(zip(programs, (json.loads(line[1:]) for line in lines), strict=True))


def test_each_race_is_told_once_with_both_lines(python: Run, tmp_path: Path) -> None:
    found = told(python, tmp_path, RACES)
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(RACES, 1), found
    for number, (name, text) in enumerate(RACES.items()):
        marked = {str(line) for line, words in enumerate(text.splitlines(), 1) if words.endswith("# here")}
        assert set(re.findall(rf"{number}\.py:(\d+)", found[name][0])) >= marked, found[name]


def test_nothing_is_told_where_everything_waits(python: Run, tmp_path: Path) -> None:
    assert told(python, tmp_path, CLEAN) == {name: [] for name in CLEAN}


BEFORE_CUDA = """
import torch, meshwise as mw
with mw.find_races() as found:
    rows = torch.utils.data.DataLoader(torch.arange(8.0), 4, num_workers=1, collate_fn=torch.stack)
    sums = [float((batch + 1).sum().numpy()) for batch in rows]
    assert sums == [10, 26] and not torch.cuda.is_initialized()
    host = torch.ones(4096, device="cuda").to("cpu", non_blocking=True)
    host.add_(1)
assert [each.sentence.split(" what ")[0] for each in found] == ["program:8: the host writes"]
"""


def test_looking_for_races_leaves_cuda_to_the_program_which_may_begin_with_it_later(program: Run) -> None:
    program(BEFORE_CUDA)


LEFT_OUT = """
import meshwise as mw, torch
side = torch.cuda.Stream()
model = torch.nn.Linear(8, 1).cuda()
data = torch.utils.data.TensorDataset(torch.ones(16, 8), torch.ones(16, 1))
model, optimizer, loader = mw.distribute(
    model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, batch_size=4))
for x, y in loader:
    x = x.cuda() * 2
    WAIT
    with torch.cuda.stream(side):
        x = x + 1
    torch.cuda.current_stream().wait_stream(side)
    (model(x) - y.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_check_perturb_follows_streams_and_says_where_the_wait_is_missing(meshwise: Run, tmp_path: Path) -> None:
    for wait in ("side.wait_stream(torch.cuda.current_stream())", "pass"):
        (tmp_path / "train.py").write_text(LEFT_OUT.replace("WAIT", wait))
        done = meshwise("check", "--perturb", "--devices", "2xcuda", "train.py", check=False)
        assert done.returncode == (wait == "pass"), done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert re.search(r"train\.py:12: stream \d of cuda:\d reads what the default stream wrote at train\.py:9", said)
