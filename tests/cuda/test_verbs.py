"""Every command on fake GPUs: it does what it does on CPU workers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import free_port

pytestmark = pytest.mark.evidence(
    "`devices`, `bench`, `plan`, `run`, `check`, `predict`, `report` and `checkpoints` work; a killed rank is "
    "replaced, a hang explained; an end of memory and missing bf16 are told with the remedy; arrays, copies"
)

JOB = f"{Path(__file__).with_name('jobs.py')}:decoder"
Run = Callable[..., Any]


@pytest.fixture
def run_folder(meshwise: Run, tmp_path: Path) -> Path:
    meshwise("run", JOB, "--devices", "2xcuda", "--save-every", "3")
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def test_a_run_is_reported_listed_verified_resumed_on_fewer_devices_and_predicts(
    meshwise: Run, run_folder: Path
) -> None:
    report = json.loads(meshwise("report", run_folder, "--json").stdout)
    assert [rank["device"] for rank in report["ranks"]] == ["NVIDIA A100-SXM4-80GB"] * 2
    assert meshwise("report", run_folder, "--html").returncode == 0 and (run_folder / "report.html").exists()
    assert "whole" in meshwise("checkpoints", run_folder, "--verify").stdout
    assert "finished" in meshwise("runs").stdout
    meshwise("run", "--resume", run_folder, "--epochs", "2", "--devices", "1xcuda")


def test_a_check_on_gpus_says_equal(meshwise: Run) -> None:
    assert "equal" in meshwise("check", JOB, "--devices", "2xcuda", "--set", "shard=2").stdout


def test_devices_names_what_was_asked_for(meshwise: Run, fake: Run) -> None:
    fake(gpu="H100", devices=8)
    said = meshwise("devices").stdout
    assert "cuda:0-7" in said and "H100" in said and "80.0 GiB" in said, said


def test_bench_finds_every_byte_where_it_belongs(meshwise: Run) -> None:
    said = " ".join(meshwise("bench", "--devices", "2xcuda", "--sizes", "64K", "--seconds", "0.2").stdout.split())
    assert re.search(r"(\d+) of \1 paths delivered the bytes they were given", said)
    assert "nccl" in said and "cuda:0 → cuda:1" in said


def test_bench_between_hosts_measures_from_gpu_to_gpu(processes: None) -> None:
    """Two starts of torchrun with a GPU each are two hosts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank"]
    words = ["-m", "meshwise", "bench", "--hosts", "--sizes", "1K", "--seconds", "0.5", "--json"]
    hosts = [
        subprocess.Popen(
            [*command, str(host), *words],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(host)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    (out, err), (other_out, other_err) = (host.communicate(timeout=120) for host in hosts)
    assert [host.returncode for host in hosts] == [0, 0], err + other_err
    results = json.loads(out)["results"]
    assert {each["path"] for each in results} == {"nccl"} and other_out == ""
    assert len(results) == 8 and all(each["wrong"] is None for each in results)


def test_bf16_on_a_device_that_only_emulates_it_is_refused(meshwise: Run, fake: Run) -> None:
    fake(gpu="T4")
    found = meshwise("bench", "--compute", "--devices", "1xcuda", "--seconds", "0.2", check=False).stdout
    assert "fp16 products" in found and "bf16 products" not in found
    done = meshwise("run", JOB, "--devices", "2xcuda", "--set", "precision=bf16", check=False)
    assert done.returncode == 2 and "this GPU is too old for bf16" in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stdout + done.stderr


VERBS_OF_A_SCRIPT = """
import torch, meshwise as mw
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.ones(9, 4), torch.arange(9))
model, optimizer, loader = mw.distribute(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4), view="rank")
for x, n in loader:
    mw.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    mw.print("sum", float(mw.sum(n.sum())), float(mw.sum(n.cpu().sum())))
    some, none = n.double().sum(), torch.zeros((), dtype=torch.float64)  # of the host, as on a rank without items
    mw.print("sum", float(mw.sum(none if mw.rank() else some)), float(mw.mean(some if mw.rank() else none)))
    mw.print("all", mw.gather_samples(n).tolist(), mw.gather_samples(n.cpu()).tolist())
mw.empty_cache()
mw.print("memory", mw.memory())
"""


def test_the_verbs_of_a_script_take_tensors_of_the_device_and_of_the_host(meshwise: Run, tmp_path: Path) -> None:
    (tmp_path / "verbs.py").write_text(VERBS_OF_A_SCRIPT)

    def said(kind: str) -> list[str]:
        out = meshwise("run", "--devices", f"2x{kind}", "verbs.py").stdout
        assert ("cuda:0: " in out and " allocated" in out) is (kind == "cuda"), out
        return [line for line in out.splitlines() if line.startswith(("sum", "all"))]

    assert said("cuda") == said("cpu") != []


def test_plans_for_the_gpus_that_are_here_are_told_to_fit(meshwise: Run) -> None:
    said = meshwise("plan", JOB, "--devices", "2", "--set", "data=2").stdout
    assert "A100" in said and "of 80.0 GiB" in said and "fits" in said


def test_predictions_are_those_of_cpu_workers(meshwise: Run, run_folder: Path, tmp_path: Path) -> None:
    def predicted(kind: str) -> list[Any]:
        out = tmp_path / f"{kind}.jsonl"
        meshwise("predict", JOB, "--weights", run_folder, "--devices", f"2x{kind}", "--out", out)
        return [json.loads(line) for line in out.read_text().splitlines()]

    assert predicted("cuda") == predicted("cpu") != []


def test_a_hang_names_the_rank_and_what_the_devices_wait_for(meshwise: Run) -> None:
    done = meshwise(
        "run", JOB, "--devices", "2xcuda", "--epochs", "4", "--fault", "hang:rank=1,step=10", "--hang-limit", "4"
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert "rank 1 is in its phase" in said and "rank 0 waits for it in all-reduce of gradients" in said, said
    assert "rank 0, by torch's flight recorder:" in said and "finished after" in said, said


def test_a_plan_that_was_chosen_here_is_run_here(meshwise: Run) -> None:
    """The rehearsal's stand-in for a GPU hid the GPUs from the run that followed it."""
    assert "finished after" in meshwise("run", JOB, "--plan", "auto", timeout=400).stdout


def test_a_killed_rank_is_started_again_on_its_device(meshwise: Run, tmp_path: Path) -> None:
    """The system shows no fake GPU on its bus, as in some containers: none is taken for lost."""
    said = meshwise("run", JOB, "--set", "data=2", "--fault", "kill:rank=1,step=4").stdout  # on all that are here
    assert "was killed by SIGKILL" in said and "finished after" in said


def test_what_does_not_fit_is_said_with_the_remedy(meshwise: Run, fake: Run) -> None:
    fake(memory=24)
    done = meshwise("run", "gpt", "--devices", "1xcuda", "--restarts", "0", check=False)
    assert done.returncode == 1
    assert "out of memory" in (done.stdout + done.stderr).lower() and "Traceback" not in done.stdout


def test_arrays_and_copies_between_devices_are_right(program: Run) -> None:
    program("""
import numpy as np, torch, meshwise as mw
xp = mw.array_namespace("cuda")
a = np.arange(24.0).reshape(6, 4)
x = xp.asarray(a)
pairs = ((x + 1, a + 1), (x @ x.T, a @ a.T), (xp.sum(x, axis=0), a.sum(0)), (xp.sort(-x, axis=1), np.sort(-a, axis=1)))
for ours, theirs in pairs:
    np.testing.assert_allclose(np.asarray(ours.numpy()), theirs)
src = torch.arange(1e6, device="cuda:0")
dst = torch.empty(10**6, device="cuda:1")
mw.copy(dst, src, verify=True)
assert torch.equal(dst.cpu(), src.cpu())
parts = mw.scatter(src, ["cuda:0", "cuda:1"])
both = mw.all_reduce([src.clone(), src.to("cuda:1")])
assert torch.equal(both[0].cpu(), 2 * src.cpu()) and torch.equal(both[1].cpu(), 2 * src.cpu())
assert float(xp.sum(xp.from_dlpack(torch.ones(3, device="cuda:1")))) == 3
single = mw.array_namespace(["cuda:1"]).asarray(a)
assert single.__cuda_array_interface__["shape"] == a.shape and torch.as_tensor(single, device="cuda").sum() == a.sum()
assert not hasattr(x, "__cuda_array_interface__")
assert not hasattr(mw.array_namespace("1xcpu").asarray(a), "__cuda_array_interface__")
assert mw.array_namespace(["cpu", "cpu"]).asarray(a).sum() == a.sum()
for wrong in (["cuda:0", "cpu"], "3xcuda", "cuda:7"):
    try:
        mw.array_namespace(wrong)
    except mw.UsageError as error:
        print(error)
    else:
        raise AssertionError(wrong)
with mw.virtual_devices(2):
    u, v = torch.ones(3, device="cpu:1"), torch.tensor([1.0, 2.0, 3.0], device="cuda:1")
    assert torch.equal(u.to("cuda:1") + v, v + 1) and torch.equal(v.to("cpu:1") + u, (v + 1).cpu().to("cpu:1"))
    assert torch.equal(mw.to(u + 1, "cuda:1") * v, 2 * v) and mw.to(v, "cuda:0").device == src.device
    assert torch.equal(mw.to(src, "cpu:1", path="staged", verify=True).to("cpu"), src.cpu())
    assert mw.copy(torch.empty(10**6), src).sum() == src.sum() and mw.to(src, "cpu:1").sum() == src.sum()
assert torch.equal(mw.gather(parts, "cuda:1").cpu(), src.cpu())
""", devices=2, schedule="random", seed=4)  # fmt: skip
