"""The fake CUDA itself: what its values, streams, memory and errors are."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.evidence(
    "the fake itself: float32 trains as on the CPU, bit for bit, bf16, fp16 and recurrent layers within a bound; a "
    "missing wait is wrong numbers under some schedule; an end of memory, what is left at the end and what NCCL would "
    "not say are errors; A100, H100 and T4 are told by count, capability and bf16 alone"
)

Program = Callable[..., str]

MODELS = """
import torch, torch.nn.functional as F
from torch import nn

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 10)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    def forward(self, x):
        x = self.embed(x)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.out(self.block(x).mean(1))

def mlp():
    return nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10)), torch.randn(16, 20)
def cnn():
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, groups=2), nn.ReLU()
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    return nn.Sequential(*first, *last), torch.randn(16, 3, 12, 12)
def gpt():
    return Decoder(), torch.randint(0, 50, (16, 12))

def trained(make, optimizer, device, dtype=None, steps=5):
    torch.manual_seed(0)
    model, x = make()
    y = torch.randint(0, 10, (16,)).to(device)
    model, x = model.to(device), x.to(device)
    step, losses = optimizer(model.parameters()), []
    for _ in range(steps):
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x), y)
        step.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.step()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]
"""

EQUAL = """
optimizers = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "plain": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
}
for make in (mlp, cnn, gpt):
    for name, optimizer in optimizers.items():
        (a, p), (b, q) = trained(make, optimizer, "cpu"), trained(make, optimizer, "cuda")
        assert a == b, (make.__name__, name, a, b)
        assert all(map(torch.equal, p, q)), (make.__name__, name)
"""


@pytest.mark.parametrize("schedule", ["immediate", "default-late", "side-late", "random"])
def test_float32_training_is_that_of_the_cpu_bit_for_bit(program: Program, schedule: str) -> None:
    program(MODELS + EQUAL, schedule=schedule, seed=1)


def test_half_precision_stays_near_the_cpus(program: Program) -> None:
    """autocast's lists of CUDA and of the CPU differ: 2e-2 of a loss of 2.3 is 3 roundings of bfloat16."""
    program(MODELS + """
for dtype in (torch.bfloat16, torch.float16):
    for make in (mlp, cnn, gpt):
        a, _ = trained(make, lambda p: torch.optim.SGD(p, 0.01), "cpu", dtype)
        b, _ = trained(make, lambda p: torch.optim.SGD(p, 0.01), "cuda", dtype)
        assert max(abs(x - y) for x, y in zip(a, b)) < 2e-2, (dtype, make.__name__, a, b)
""")  # fmt: skip


def test_recurrent_layers_are_those_of_the_cpu_within_rounding(program: Program) -> None:
    """CUDA adds the biases of their cells in one kernel of its own."""
    program("""
import copy, torch
from torch import nn
layers = nn.LSTM(6, 8, 2), nn.GRU(6, 8, 2), nn.GRU(6, 8, bias=False), nn.RNN(6, 8), nn.LSTMCell(6, 8), nn.GRUCell(6, 8)
for layer in layers:
    layer, x = layer.double(), torch.randn(5, 3, 6).double()
    x = x[0] if isinstance(layer, nn.RNNCellBase) else x
    found = []
    for device in ("cpu", "cuda"):
        mine, given = copy.deepcopy(layer).to(device), x.detach().to(device).requires_grad_()
        out = mine(given)
        first = out[0] if isinstance(out, tuple) else out
        first.square().sum().backward()
        found.append([each.cpu() for each in (first, given.grad, *(p.grad for p in mine.parameters()))])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, 1e-12, 1e-14), type(layer)
""")  # fmt: skip


RACES = {
    "a copy to the host is read before its event": """
src = torch.arange(1e4, device="cuda") * 2
host = torch.empty(10000, pin_memory=True)
host.copy_(src, non_blocking=True)
WAIT
good = host[5000].item() == 10000
""",
    "another stream reads before the first has written": """
side = torch.cuda.Stream()
x = torch.zeros(1000, device="cuda"); torch.cuda.synchronize()
x.add_(1)
WAIT
with torch.cuda.stream(side):
    y = x * 2
side.synchronize()
good = y[0].item() == 2
""",
    "the default stream reads before the other has written": """
side = torch.cuda.Stream()
x = torch.zeros(1000, device="cuda"); torch.cuda.synchronize()
with torch.cuda.stream(side):
    x.add_(1)
WAIT
good = (x * 2)[0].item() == 2
""",
}
WAITS = {
    "a copy to the host is read before its event": "torch.cuda.current_stream().synchronize()",
    "another stream reads before the first has written": "side.wait_stream(torch.cuda.current_stream())",
    "the default stream reads before the other has written": "torch.cuda.current_stream().wait_stream(side)",
}


@pytest.mark.parametrize("race", RACES)
def test_a_missing_wait_is_wrong_numbers_under_some_schedule_and_a_wait_right_ones_under_all(
    program: Program, race: str
) -> None:
    def right(wait: str) -> list[bool]:
        found = []
        for schedule, seed in (("default-late", 0), ("side-late", 0), ("random", 1), ("random", 2)):
            text = "import torch\n" + RACES[race].replace("WAIT", wait) + "\nprint('right' if good else 'wrong')"
            found.append("right" in program(text, schedule=schedule, seed=seed))
        return found

    assert all(right(WAITS[race]))
    assert not all(right("pass"))


def test_the_same_seed_gives_the_same_wrong_numbers(program: Program) -> None:
    race = RACES["another stream reads before the first has written"].replace("WAIT", "pass")
    text = "import torch\nfor _ in range(20):\n" + "".join(f"    {line}\n" for line in race.strip().splitlines())
    text += "    print(good)\n"
    first, second = (program(text, schedule="random", seed=5) for _ in range(2))
    assert first == second and "False" in first


def test_random_numbers_follow_seed_and_state_of_the_devices_generator(program: Program) -> None:
    program("""
import torch
torch.manual_seed(3); a = torch.rand(100, device="cuda"), torch.randn(5, device="cuda")
state = torch.cuda.get_rng_state(); b = torch.rand(100, device="cuda")
torch.cuda.set_rng_state(state); c = torch.rand(100, device="cuda")
torch.manual_seed(3); d = torch.rand(100, device="cuda")
assert torch.equal(b, c) and torch.equal(a[0], d) and not torch.equal(a[0], b)
kept = torch.nn.functional.dropout(torch.ones(10000, device="cuda"), 0.25)
assert abs((kept == 0).float().mean().item() - 0.25) < 0.03 and abs(kept.max().item() - 4 / 3) < 1e-6
""")  # fmt: skip


def test_memory_ends_at_its_limit(program: Program) -> None:
    program("""
import torch
kept = [torch.zeros(1 << 20, device="cuda") for _ in range(10)]
try:
    torch.zeros(1 << 25, device="cuda")
    raise SystemExit("128 MiB of 64 were given")
except torch.OutOfMemoryError:
    pass
del kept
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
assert free == total == 64 << 20, (free, total)
""", memory=64)  # fmt: skip


CARDS = [("A100", (8, 0), True), ("H100", (9, 0), True), ("T4", (7, 5), False)]


@pytest.mark.parametrize(("gpu", "capability", "bf16"), CARDS)
def test_a_device_is_what_was_asked_for(program: Program, gpu: str, capability: tuple[int, int], bf16: bool) -> None:
    program(f"""
import torch
assert torch.cuda.device_count() == 8 and torch.cuda.get_device_capability(7) == {capability}
assert torch.cuda.is_bf16_supported(including_emulation=False) is {bf16}
""", gpu=gpu, devices=8)  # fmt: skip


def test_a_forked_child_cannot_use_a_device_that_its_parent_used(program: Program) -> None:
    done = program("""
import os, torch
torch.ones(1, device="cuda")
if os.fork() == 0:
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        print("refused:", str(error)[:40]); os._exit(0)
    os._exit(1)
assert os.wait()[1] == 0
""")  # fmt: skip
    assert "refused: Cannot re-initialize CUDA" in done


PAIR = """
import os, sys, torch, torch.distributed as dist
rank, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
torch.cuda.set_device({device})
dist.init_process_group("nccl")
{body}
torch.cuda.synchronize()
"""


@pytest.mark.parametrize(
    ("device", "body", "says"),
    [
        ("rank", "dist.all_reduce(torch.ones(4 + rank, device='cuda'))", "collectives differ between ranks: rank"),
        ("0", "dist.all_reduce(torch.ones(4, device='cuda'))", "ranks 0 and 1 are both on device 0"),
        (
            "rank",
            "x = torch.ones(4, device='cuda'); dist.broadcast(x, 0) if rank else dist.all_reduce(x)",
            "collectives differ between ranks: rank",
        ),
    ],
)
def test_what_nccl_would_not_say_is_an_error_with_the_calls_name(
    program: Program, tmp_path: Path, device: str, body: str, says: str
) -> None:
    (tmp_path / "pair.py").write_text(PAIR.format(device=device, body=body))
    said = program("""
import socket, subprocess, sys
with socket.socket() as free:
    free.bind(("127.0.0.1", 0)); port = str(free.getsockname()[1])
both = [subprocess.Popen([sys.executable, "pair.py", str(rank), port]) for rank in range(2)]
both[0].wait(100); both[1].wait(100)
""")  # fmt: skip
    assert says in said


TRAINS = """
import torch
model, side, pin = torch.nn.Linear(8, 8).cuda(), torch.cuda.Stream(), torch.cuda.cudart().cudaHostRegister
optimizer = torch.optim.Adam(model.parameters())
for _ in range(20):
    x = torch.randn(4, 8).pin_memory().cuda(non_blocking=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = model(x)
    torch.cuda.current_stream().wait_stream(side)
    y.square().mean().backward()
    optimizer.step()
    torch.cuda.Event().record()
    LEAK
"""
LEAKS = {
    "torch.w = [torch.cuda.Event(), *getattr(torch, 'w', [])]; torch.w[0].record()": "events that cudaEventCreate",
    "torch.kept = torch.ones(9).pin_memory()": "pinned bytes that cudaHostAlloc",
    "torch.kept = y.detach()": "device bytes that cudaMalloc",
    "hasattr(torch, 'w') or (setattr(torch, 'w', x.cpu()), pin(torch.w.data_ptr(), 128, 0))": "cudaHostRegister made",
}


@pytest.mark.parametrize("leak", ["pass", *LEAKS])
def test_what_is_left_at_exit_is_an_error_with_the_calls_name(program: Program, leak: str) -> None:
    said = program(TRAINS.replace("LEAK", leak), fails=leak != "pass", leaks=1)
    assert ("are left at exit" in said) is (leak != "pass") and LEAKS.get(leak, "") in said, said
