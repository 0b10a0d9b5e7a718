"""Workers start, whoever has touched CUDA before: the launcher, a notebook's cell, the script, a plugin of torch.

What asks the driver for devices spoils every fork that follows (`torch.cuda._is_in_bad_fork`), and from then on
CUDA_VISIBLE_DEVICES is not read again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwise.workers.fork_server import LISTENS

pytestmark = pytest.mark.evidence(
    "workers start where CUDA was touched before, loader workers too; no module asks for a device while it is imported"
)

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]

TOUCHES = {
    "untouched": "",
    "asked": "torch.cuda.is_available()",
    "used": "torch.ones(3, device='cuda')",
    "grouped": "import os; 'TORCHELASTIC_RUN_ID' in os.environ and torch.distributed.init_process_group('nccl')",
}
SCRIPT = """
import torch
TOUCH
import meshwise as mw
torch.manual_seed(0)
model = torch.nn.Linear(4, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
collate = lambda rows: [torch.stack(each) for each in zip(*rows)]
loader = torch.utils.data.DataLoader(data, 8, num_workers=2, pin_memory=True, collate_fn=collate)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x, y in loader:
    loss = ((model(x.to("cuda")) - y.to("cuda")) ** 2).mean()
    optimizer.zero_grad()
    mw.backward(loss)
    optimizer.step()
bus = torch.cuda.get_device_properties(torch.cuda.current_device()).pci_bus_id
print(f"on {bus}: {sum(p.sum().item() for p in model.parameters()):.5f}.", flush=True)
"""
CELLS = """
import torch
TOUCH
import meshwise as mw

def work(times):
    from torch.utils.data import DataLoader
    total = torch.ones(2, device="cuda") * times
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
    rows = DataLoader(torch.arange(8), 2, num_workers=2, pin_memory=True, collate_fn=lambda rows: torch.stack(rows))
    return total.tolist(), sum(int(batch.sum()) for batch in rows)

for devices in DEVICES:
    print(devices, mw.launch(work, 3, devices=devices), flush=True)
"""
TORCHRUN = "-m", "torch.distributed.run", "--nproc-per-node"
MESHWISE = "-m", "meshwise", "run", "--devices"


@pytest.fixture(autouse=True)
def each_launch_has_a_fork_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LISTENS, raising=False)


@pytest.mark.parametrize("devices", [0, 2])
def test_no_module_of_ours_spoils_the_forks_that_follow(
    devices: int, fake: Run, python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(devices=devices)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    python("-m", "tests.every_import", "cuda")


def test_workers_start_after_the_launcher_has_counted_its_devices(python: Run) -> None:
    text = "from meshwise.hardware.find import accelerators\nassert accelerators() == ('cuda', 2)\n"
    done = python("-c", text + CELLS.replace("TOUCH", "").replace("DEVICES", "['1xcuda', '2xcuda']"))
    assert done.stdout.splitlines() == ["1xcuda [([3.0, 3.0], 28)]", "2xcuda [([6.0, 6.0], 28), ([6.0, 6.0], 28)]"]


def test_a_notebook_whose_earlier_cell_used_a_gpu_launches_workers_on_all(python: Run) -> None:
    done = python("-c", CELLS.replace("TOUCH", "held = torch.ones(3, device='cuda:1')").replace("DEVICES", "['all']"))
    assert done.stdout.splitlines() == ["all [([6.0, 6.0], 28), ([6.0, 6.0], 28)]"]


def trained(output: str) -> dict[str, str]:
    """The GPU of each rank that is shown, by its bus, with what it has trained."""
    return dict(line[3:].rstrip(".").split(": ") for line in output.splitlines() if line.startswith("on "))


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_script_may_touch_cuda_above_its_first_line_of_ours(touch: str, python: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("TOUCH", TOUCHES[touch]))
    alone = trained(python("train.py").stdout)
    launched = trained(python(*MESHWISE, "2xcuda", "train.py").stdout)
    under_torchrun = trained(python(*TORCHRUN, 2, "train.py").stdout)
    assert list(alone) == list(launched) == ["16"]
    assert set(under_torchrun) == {"16", "17"}, "each rank has a GPU of its own"
    assert {*alone.values(), *launched.values(), *under_torchrun.values()} == {alone["16"]}


def test_torchrun_starts_a_job_on_a_gpu_a_rank(python: Run) -> None:
    job = f"{Path(__file__).with_name('jobs.py')}:decoder"
    done = python(*TORCHRUN, 2, "-m", "meshwise", "run", job, "--epochs", "1")
    assert "finished after" in done.stdout and "2 devices" in done.stdout, done.stdout


def test_torchrun_with_more_ranks_than_gpus_is_refused(python: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("TOUCH", ""))
    done = python(*TORCHRUN, 3, "train.py", check=False)
    assert done.returncode != 0
    assert "torch finds only 2 GPUs, so local rank 2 has none. Start fewer processes." in done.stderr


def test_a_worker_starts_anew_where_a_plugin_asks_for_devices_before_the_fork(
    python: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "plugin" / "plugin-1.dist-info"
    described.mkdir(parents=True)
    (tmp_path / "plugin" / "plugin.py").write_text("import torch\nload = torch.cuda.is_available\n")
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[torch.backends]\nplugin = plugin:load\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "plugin"), prepend=":")
    done = python("-c", CELLS.replace("TOUCH", "").replace("DEVICES", "['2xcuda']"))
    assert done.stdout.splitlines() == ["2xcuda [([6.0, 6.0], 28), ([6.0, 6.0], 28)]"]


def test_a_dataset_that_makes_cuda_tensors_in_a_loaders_worker_is_told_what_to_write(
    python: Run, tmp_path: Path
) -> None:
    on_gpu = "class Rows(torch.utils.data.TensorDataset):\n    def __getitem__(self, i):\n"
    on_gpu += "        return [each.to('cuda') for each in super().__getitem__(i)]\n"
    text = SCRIPT.replace("TOUCH", on_gpu).replace("torch.utils.data.TensorDataset(torch", "Rows(torch")
    text = text.replace(", pin_memory=True", "")
    (tmp_path / "train.py").write_text(text)
    done = python(*MESHWISE, "1xcuda", "train.py", check=False)
    assert done.returncode == 1
    assert "return CPU tensors, or set its multiprocessing_context='spawn'" in done.stdout + done.stderr
