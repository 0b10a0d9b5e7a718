"""Scripts and commands on fake GPUs: what they print and save is what CPU workers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwise.torch_compat.tree import tensors_in

pytestmark = pytest.mark.evidence(
    "scripts print, save and resume as on CPU workers: loader workers, pinning, fp16, a fused optimizer, a model made "
    "on the CPU; `check` proves a plan"
)

SCRIPT, JOB = Path(__file__).with_name("script.py"), f"{Path(__file__).with_name('jobs.py')}:decoder"
SCRIPTS = [
    ("fused", ["data=2", "offload=activations"]),
    ("workers", ["shard=2"]),
    ("workers fp16", ["data=2", "zero1=true"]),
    ("fp16", ["shard=2", "recompute=selective"]),
    ("fused", ["tensor=2"]),
]


def tensors(path: Path) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors_in(torch.load(path))]


@pytest.mark.parametrize(("words", "plan"), SCRIPTS)
def test_a_script_does_on_gpus_what_it_does_on_cpu_workers(
    meshwise: Any, fake: Any, tmp_path: Path, words: str, plan: list[str]
) -> None:
    settings, said = [word for each in plan for word in ("--set", each)], []
    fake(schedule="random", seed=len(words))
    for kind in ("cpu", "cuda"):
        done = meshwise("run", "--devices", f"2x{kind}", *settings, SCRIPT, *words.split(), kind)
        said.append([line for line in done.stdout.splitlines() if line.startswith(("loss", "average"))])
    assert said[0] == said[1] and len(said[0]) == 11
    for a, b in zip(tensors(tmp_path / "state-cpu.pt"), tensors(tmp_path / "state-cuda.pt"), strict=True):
        assert torch.equal(a, b)


ON_CPU = """
import torch
import meshwise as mw

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for x in loader:
    mw.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
    state = [v for each in optimizer.state.values() for name, v in each.items() if name != "step"]
    mw.print({str(t.device) for t in (*model.parameters(), x, *state)})
"""


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_made_on_the_cpu_moves_to_the_gpu_of_its_worker(meshwise: Any, tmp_path: Path, count: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(ON_CPU)
    done = meshwise("run", "--devices", f"{count}xcuda", script)
    assert done.stdout.count("{'cuda:0'}") == 2
    assert "{'cpu'}" in meshwise("run", "--devices", f"{count}xcpu", script).stdout


def test_a_run_on_gpus_goes_on_under_another_plan(meshwise: Any, tmp_path: Path) -> None:
    def goes_on(kind: str) -> list[float]:
        folder, losses = tmp_path / kind, list[float]()
        meshwise("run", JOB, "--devices", f"2x{kind}", "--set", "shard=2", "--out", folder)
        (run,) = folder.iterdir()
        settings = ["--set", "pipeline=2", "--set", "accumulate=2"]
        done = meshwise("run", "--resume", run, "--devices", f"2x{kind}", "--epochs", 2, *settings)
        assert "unbatched" not in done.stdout + done.stderr  # no word of torch's about how stages send
        for line in (run / "metrics.jsonl").read_text().splitlines():
            losses += [float(part.split("}")[0].split(",")[0]) for part in line.split('"loss":')[1:]]
        return losses

    assert goes_on("cuda") == goes_on("cpu") != []


OWN_GROUP = """
import os, sys, torch, meshwise as mw
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
sys.path.append(sys.argv[1])
from jobs import decoder
for plan in (["data=2"], ["pipeline=2", "accumulate=2"]):
    summary = mw.run(decoder(), settings=[*plan, "precision=fp64"])
    print("error", summary.metrics["error"], flush=True)
torch.distributed.destroy_process_group()
"""


def test_stages_send_in_a_group_that_the_program_made(python: Any, tmp_path: Path) -> None:
    """Without `device_id` a send alone and a receive in a group have connections of their own: both waited for ever."""
    (tmp_path / "own.py").write_text(OWN_GROUP)
    words = "-m", "torch.distributed.run", "--nproc-per-node", 2, "own.py", Path(__file__).parent
    said = python(*words, timeout=120).stdout.splitlines()
    errors = [float(line.split()[1]) for line in said if line.startswith("error")]
    assert len(errors) == 4 and errors == pytest.approx(errors[:1] * 4, rel=1e-9)


@pytest.mark.parametrize("plan", ["shard=2", "tensor=2"])
def test_a_check_on_gpus_says_that_the_plan_is_right(meshwise: Any, plan: str) -> None:
    done = meshwise("check", JOB, "--devices", "2xcuda", "--set", plan, "--steps", 2)
    assert f"\nequal: Plan({plan}) computes what one device computes" in done.stdout, done.stdout


def test_compile_without_triton_is_refused_with_a_sentence(meshwise: Any) -> None:
    done = meshwise("run", JOB, "--devices", "2xcuda", "--set", "compile=true", check=False)
    assert "compile=True on a GPU needs triton, which is missing." in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr and done.returncode != 0
