"""Workers are forked where nothing has asked for a device before. With torch's CUDA wheel: tests/cuda."""

import subprocess
import sys
from pathlib import Path

from meshwise.parallel.apply import TECHNIQUES

ASKS = [
    "torch.cuda.is_available()",
    "torch.cuda.device_count()",
    "torch.cuda.mem_get_info()",
    "torch.cuda.get_device_properties(0)",
    "torch.accelerator.current_accelerator()",
    "torch.accelerator.device_count()",
    "torch._C._accelerator_getAccelerator()",
    "torch.get_device_module()",
    "torch.xpu.is_available()",
    "torch.ones(1, device='cuda')",
]
FOUND = """
import os, sys, torch
from tests.every_import import stand_in
stand_in()
for line in sys.argv[1:]:
    if os.fork() == 0:
        exec(line)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command, root = [sys.executable, *words], Path(__file__).parents[1]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)


def test_neither_a_module_of_ours_nor_the_fork_server_asks_for_a_device(processes: None) -> None:
    done = run("-m", "tests.every_import", "calls")
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 500


def test_whoever_asks_for_a_device_is_found(processes: None) -> None:
    done = run("-c", FOUND, *ASKS)
    codes = [line for line in done.stdout.splitlines() if line in ("0", "1")]
    assert codes == ["1"] * len(ASKS), done.stdout + done.stderr
    for name in ("torch.cuda.is_available", "torch.accelerator.device_count", "torch._C._get_accelerator"):
        assert f"{name} is called:\n" in done.stdout


DRAWS = """
import importlib, pathlib, random
import numpy, torch
random.seed(0); numpy.random.seed(0); torch.manual_seed(0)
before = random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()
import meshwise

for name in meshwise.__all__:
    getattr(meshwise, name)
for house in ("reports", "hardware", "training", "checker", "planner", "launcher"):
    package = importlib.import_module(f"meshwise.{house}")
    for line in pathlib.Path(package.__file__).with_suffix(".pyi").read_text().splitlines():
        getattr(package, line.split()[-1])
after = random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()
print([one == other for one, other in zip(before, after, strict=True)])
"""


def test_a_name_that_is_used_first_moves_no_random_numbers_of_the_program(processes: None) -> None:
    """rich draws from Python's generator where it is imported: `python` and `meshwise run` drew other numbers."""
    done = run("-c", DRAWS)
    assert done.stdout.strip() == "[True, True, True]", done.stdout + done.stderr


STEP = """
import sys, torch
import meshwise as mw
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters())
loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
model, optimizer, loader = mw.distribute(model, optimizer, loader)
model(next(iter(loader))).sum().backward()
optimizer.step()
print(*(name.removeprefix("meshwise.") for name in sys.modules if name.startswith("meshwise.")))
"""
NEEDS_NONE = ("torch_compat.fake", "hardware", "integrations", "checker", "planner", "arrays", "launcher")
NEEDS_NONE += tuple(f"training.{name}" for name in ("job", "prediction", "recording.recording", "script.checkpoint"))
NEEDS_NONE += ("training.tracking", "training.commands")
NEEDS_NONE += tuple(f"parallel.{name.partition('.')[0]}" for name, _ in TECHNIQUES)


def test_a_step_of_a_plain_script_loads_what_it_needs_alone(processes: None) -> None:
    """A technique, a Trainer, records, states: each is loaded when a plan or a program asks for it."""
    loaded = run("-c", STEP).stdout.split()
    assert "training.script.distribute" in loaded
    assert not [name for name in loaded if any(f"{name}.".startswith(f"{none}.") for none in NEEDS_NONE)]
