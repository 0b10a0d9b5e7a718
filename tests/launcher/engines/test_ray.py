"""Ray: the driver of `submit --ray`, and the line inside a Ray Train loop: integrations/ray.py."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwise.launcher.engines.batch_script import BatchJob
from meshwise.launcher.engines.ray import driver_text
from meshwise.launcher.engines.site import Site
from meshwise.spec.errors import UsageError
from tests.programs.ray_loop import EPOCH, steps_of

LOOP = Path(__file__).parents[2] / "programs" / "ray_loop.py"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: ray[train]")


def job(tmp_path: Path, **changes: object) -> BatchJob:
    given: dict[str, object] = {
        "name": "train\nmine",
        "workdir": tmp_path,
        "run": tmp_path / "runs" / "1-train",
        "words": ["train.py", "--name", "it's"],
        "nodes": "1-2",
        "seconds": None,
        "gpus": 0,
        "command": [sys.executable, "launcher.py"],
        "site": Site(file="site.toml"),
    }
    return BatchJob(**given | changes)  # type: ignore[arg-type]


def test_a_driver_is_a_short_program(tmp_path: Path) -> None:
    text = driver_text(job(tmp_path, gpus=8, nodes="2-8"))
    compile(text, "submit.py", "exec")
    assert "LEAST, MOST, NODE = 2, 8, {'CPU': 1, 'GPU': 8}\n" in text
    assert text.startswith("# train mine: written by meshwise submit.") and len(text.splitlines()) < 50


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"site": Site(setup=("module load x",), file="site.toml")}, "site.toml: setup is for Slurm"),
        ({"seconds": 60.0}, "--time: Ray has no time limit"),
    ],
)
def test_what_ray_cannot_do_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        driver_text(job(tmp_path, **changes))


@needs_ray
@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_driver_starts_again_on_85_and_ends_with_the_code_of_the_run(tmp_path: Path) -> None:
    stand_in = "import json, os, sys; n = len(os.listdir('asked')); json.dump(sys.argv, open(f'asked/{n}', 'w'))\n"
    (tmp_path / "asked").mkdir()
    (tmp_path / "launcher.py").write_text(stand_in + "sys.exit([85, 93][n])\n")
    text = driver_text(job(tmp_path)).replace("ray.init()", "ray.init('local', num_cpus=1, include_dashboard=False)")
    (tmp_path / "submit.py").write_text(text)
    done = subprocess.run([sys.executable, tmp_path / "submit.py"], capture_output=True, text=True)
    assert done.returncode == 93, done.stderr[-2000:]
    asked = [json.loads((tmp_path / "asked" / str(n)).read_text()) for n in (0, 1)]
    for words in asked:
        assert words[1:4] == ["run", "--folder", str(tmp_path / "runs" / "1-train")]
        assert words[4:8] == ["--nnodes", "1", "--node-rank", "0"]
        assert words[8] == "--master-addr" and words[10] == "--master-port" and int(words[11]) > 0
        assert words[12:] == ["train.py", "--name", "it's"]


@needs_ray
@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_any_number_of_workers_computes_what_one_device_does_and_reports_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, LOOP, tmp_path / "one"], check=True)
    done = subprocess.run([sys.executable, LOOP, tmp_path / "log", "2", "3", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    one, ours = steps_of(tmp_path / "one"), steps_of(tmp_path / "log")
    assert [step for _, step, *_ in ours] == [step for _, step, *_ in one] == list(range(3 * EPOCH))
    assert [size for _, _, _, size, _ in ours][::EPOCH] == [2, 3, 1]
    assert max(abs(a[2] - b[2]) for a, b in zip(one, ours, strict=True)) < 1e-9
    reported = [line.split() for line in done.stdout.splitlines() if line.startswith("reported")]
    assert [int(words[1]) for words in reported] == [EPOCH, 2 * EPOCH, 3 * EPOCH]
    for words, step in zip(reported, ours[EPOCH - 1 :: EPOCH], strict=True):
        assert float(words[2]) == step[2] and words[3].startswith(f"step-{int(words[1]):08}")
