"""Each example runs, and prints the same numbers on one device and on two."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch

from meshwise.launcher.engines.site import read_site
from meshwise.training.process.session import end_sessions
from meshwise.workers.environment import PLAN_FILE, RUN_FOLDER
from tests import run_programs
from tests.run_programs import numbers

pytestmark = pytest.mark.usefixtures("processes")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*words: str, folder: Path) -> str:
    result = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def alone(name: str, *words: str, folder: Path) -> list[str]:
    return run(str(EXAMPLES / name), *words, folder=folder).splitlines()


def on_two(name: str, *words: str, folder: Path, options: Sequence[str] = ()) -> list[str]:
    """What rank 0 prints; the first line is the launcher's, one says what is divided. words: the script's own."""
    command = ["-m", "meshwise", "run", "--devices", "2xcpu", *options, str(EXAMPLES / name), *words]
    return [line for line in run(*command, folder=folder).splitlines()[1:] if not line.startswith("divided: ")]


@pytest.mark.slow
def test_mnist_prints_the_tutorials_lines(tmp_path: Path) -> None:
    one = alone("01_mnist.py", "--epochs", "1", folder=tmp_path)
    two = on_two("01_mnist.py", "--epochs", "1", folder=tmp_path)
    assert re.fullmatch(r"Epoch \[1/1\], Step \[100/938\], Loss: 0\.\d{4}", one[0])
    assert one[-2] == two[-2] == "Training Finished!"
    assert numbers(two) == pytest.approx(numbers(one), abs=0.3)
    assert numbers(two[:3]) == pytest.approx(numbers(one[:3]), abs=2e-4)


@pytest.mark.parametrize(
    "name", ["02_linear_layers.py:job", pytest.param("03_convolutions.py:job", marks=pytest.mark.slow)]
)
def test_a_job_runs_on_two_devices(name: str, tmp_path: Path) -> None:
    shown = run("-m", "meshwise", "run", str(EXAMPLES / name), "--devices", "2xcpu", "--epochs", "1", folder=tmp_path)
    assert re.search(r"epoch 1/1  test accuracy \d+\.\d\d %", shown)


@pytest.mark.slow
def test_an_own_loop_prints_and_saves_the_same_when_it_is_sharded(tmp_path: Path) -> None:
    one = alone("11_plans.py", folder=tmp_path)
    saved = torch.load(tmp_path / "plans.pt", weights_only=True)
    two = on_two("11_plans.py", folder=tmp_path, options=["--set", "shard=2"])
    assert len(numbers(one)) == 10 and numbers(two) == pytest.approx(numbers(one), abs=2e-4)
    torch.testing.assert_close(torch.load(tmp_path / "plans.pt", weights_only=True), saved, rtol=1e-3, atol=3e-4)


@pytest.mark.parametrize("name", ["04_token_mean.py", pytest.param("05_evaluate.py", marks=pytest.mark.slow)])
def test_an_own_loop_prints_the_same_numbers_on_two_devices(name: str, tmp_path: Path) -> None:
    one, two = alone(name, folder=tmp_path), on_two(name, folder=tmp_path)
    assert numbers(one) and numbers(two) == pytest.approx(numbers(one), abs=2e-4)


@pytest.mark.slow
def test_a_loop_saved_on_one_device_goes_on_on_two(tmp_path: Path) -> None:
    whole = alone("06_save_and_resume.py", "--state", "none.pt", folder=tmp_path)
    before = alone("06_save_and_resume.py", "--stop-after", "7", folder=tmp_path)
    after = [line for line in on_two("06_save_and_resume.py", folder=tmp_path) if line.startswith("step")]
    assert len(whole) == 20 and len(before) == 7 and len(after) == 13
    assert numbers(before + after) == pytest.approx(numbers(whole), abs=2e-5)


def test_launch_gives_the_results_in_rank_order(tmp_path: Path) -> None:
    assert alone("07_launch.py", folder=tmp_path) == [f"rank {rank} of 3: the ranks add up to 3" for rank in range(3)]


@pytest.mark.slow
def test_the_notebook_draws_bars_reports_a_figure_and_a_proof(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "08_notebook.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    one, two, report, figure, proof, measured, machine = [
        output["data"] for cell in cells for output in cell.outputs if output.output_type == "execute_result"
    ]
    (loss,) = json.loads(one["text/plain"])
    assert json.loads(two["text/plain"]) == pytest.approx([loss] * 2, abs=2e-5)
    bars = "".join(output["text"] for output in cells[3].outputs if output.get("name") == "stderr")
    assert bars.count("100%|") == 1  # rank 0's
    assert figure["text/html"].startswith("<iframe")
    for drawn, word in ((report, "forward"), (proof, "equal:"), (measured, "predicted"), (machine, "H100")):
        assert drawn["text/html"].startswith("<pre") and word in drawn["text/html"]


def test_the_transfer_names_its_path_and_arrives(tmp_path: Path) -> None:
    lines = alone("09_transfer.py", "--size", "300", "--verify", folder=tmp_path)
    assert lines[0].startswith("made on c") and lines[1].endswith("and back: the same: True")
    assert lines[2].split() == ["operation", "from", "to", "bytes", "path", "time", "rate"]
    assert [line.split()[0] for line in lines[3:5]] == ["to", "to"]
    assert all(re.search(r" (peer|staged|direct) ", line) for line in lines[3:])


def test_cupy_or_numpy_shares_memory_and_computes(tmp_path: Path) -> None:
    lines = alone("10_cupy_and_dlpack.py", "--size", "1000", folder=tmp_path)
    assert lines[-3] == "written by torch, read by the array: 9.0"
    assert lines[-2] == "a * 2   = [0.0, 2.0, 4.0, 6.0]"
    assert lines[-1] == "sqrt(b) = [3.0, 1.0, 1.414, 1.732]"


@pytest.mark.slow
def test_a_transformer_trains_the_same_on_two_devices_and_sharded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    one = alone("12_transformers.py", folder=tmp_path)
    assert len(one) == 3 and numbers(one)[-1] < numbers(one)[0]
    assert numbers(on_two("12_transformers.py", folder=tmp_path)) == pytest.approx(numbers(one), abs=3e-3)
    sharded = on_two("12_transformers.py", folder=tmp_path, options=["--set", "shard=2"])
    assert numbers(sharded) == pytest.approx(numbers(one), abs=3e-3)


@pytest.mark.parametrize(
    "name, needs",
    [
        ("13_ema.py", "torch"),
        ("14_tqdm.py", "tqdm"),
        ("15_autocast.py", "torch"),
        ("16_datasets.py", "datasets"),
        ("18_trainer.py", "accelerate"),
        ("19_lightning.py", "lightning"),
    ],
)
def test_a_short_example_ends_with_the_same_weights_on_two_devices(
    name: str, needs: str, pool: Any, tmp_path: Path
) -> None:
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    dtype, within = torch.float64, 1e-9
    if name == "15_autocast.py":  # it casts no double
        dtype, within = torch.float32, torch.finfo(torch.bfloat16).eps
    program = (EXAMPLES / name).read_text()
    assert program.count("\n") <= 60
    one = run_programs.run(program, tmp_path, dtype)
    end_sessions()
    for two in pool(2).run(run_programs.run, program, tmp_path, dtype):
        run_programs.assert_alike(two, one, within)


@pytest.mark.slow
def test_an_average_of_the_weights_is_the_same_when_it_is_sharded(tmp_path: Path) -> None:
    one = alone("13_ema.py", folder=tmp_path)
    two = on_two("13_ema.py", folder=tmp_path, options=["--set", "shard=2"])
    assert len(numbers(one)) == 3 and numbers(two) == pytest.approx(numbers(one), abs=2e-5)


def test_hydra_reads_what_stands_after_the_script(tmp_path: Path) -> None:
    pytest.importorskip("hydra", reason="hydra is not installed: pip install hydra-core")
    one = alone("17_hydra.py", "lr=0.2", "epochs=1", folder=tmp_path)
    assert len(one) == 1 and one[0].endswith("with lr 0.2")
    assert one[0] in on_two("17_hydra.py", "lr=0.2", "epochs=1", folder=tmp_path)


def test_the_files_for_a_cluster_are_what_they_say(tmp_path: Path) -> None:
    """Neither Slurm nor Docker is here: their commands, options and files at least exist."""
    script = (EXAMPLES / "cluster" / "slurm.sbatch").read_text()
    subprocess.run(["bash", "-n", str(EXAMPLES / "cluster" / "slurm.sbatch")], check=True)
    assert {RUN_FOLDER, PLAN_FILE} <= set(re.findall(r"MESHWISE_\w+", script))
    assert read_site(EXAMPLES / "cluster" / "site.toml").machine == "4xA100-80GB"
    image = (EXAMPLES / "cluster" / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (\S+)", image, re.MULTILINE)
    assert copied and all((EXAMPLES.parent / path).exists() for path in copied)
    extras = set(re.findall(r"meshwise\[([\w,]+)\]", image)[0].split(","))
    assert extras <= set(
        tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
