"""`meshwise predict`: what it writes and says; stopped, killed, and gone on with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwise import cli

JOB = """
import time
import torch
from torch import nn
import meshwise as mw
from meshwise.training.prediction import predict

predict.PART_SECONDS = 0.1

def rows(samples):
    return torch.randn(samples, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

def job(samples: int = 200, slow: float = 0.0):
    def predict(model, batch):
        time.sleep(slow)
        with open("computed.txt", "a") as file:
            file.write(f"{len(batch[0])}\\n")
        return model(batch[0])

    block = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    return mw.Job(
        model=lambda: nn.Sequential(nn.Linear(16, 64), block(), block(), nn.Linear(64, 5)).double(),
        loss=lambda model, batch: model(batch[0]).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=(rows(samples),),
        batch_size=32,
        predict=predict,
    )

few = (rows(10)[3:],)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(words: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["meshwise", *words.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def started(words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshwise", "predict", *words.split()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def outputs(path: str) -> torch.Tensor:
    return torch.tensor([json.loads(line) for line in Path(path).read_text().splitlines()], dtype=torch.float64)


def wait_for(seen: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not seen():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def lines_in(path: str) -> int:
    return Path(path).read_bytes().count(b"\n") if Path(path).exists() else 0


def kept() -> int:
    return sum(lines_in(str(part)) for part in Path("out.jsonl.partial").glob("0*.jsonl"))


def test_a_run_stopped_by_ctrl_c_goes_on(
    here: Path, processes: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    process = started("train.py:job --arg slow=0.2 --out out.jsonl")
    wait_for(lambda: kept() >= 32, process)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate()
    assert process.returncode == 130, text
    assert "parts are written to out.jsonl.partial: after a stop, the same command continues" in text
    assert "Traceback" not in text
    done, computed = kept(), Path("computed.txt").read_text().split()
    assert 32 <= done < 200
    assert sum(map(int, computed)) >= done
    assert ended("predict train.py:job --arg slow=0.0 --out out.jsonl", monkeypatch) == 2
    assert "contains predictions with arguments " in capfd.readouterr().err
    Path("computed.txt").unlink()
    assert not ended("predict train.py:job --arg slow=0.2 --out out.jsonl --devices 2xcpu", monkeypatch)
    assert sum(map(int, Path("computed.txt").read_text().split())) == 200 - done
    assert f"({done} of them by an earlier call)" in capfd.readouterr().out
    assert lines_in("out.jsonl") == 200
    assert ended("predict train.py:job --arg slow=0.2 --out out.jsonl", monkeypatch) == 2
    assert "out.jsonl: the file exists" in capfd.readouterr().err


def test_the_data_set_may_be_named_in_a_file(
    here: Path, processes: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not ended("predict train.py:job --data train.py:few", monkeypatch)
    shown = capfd.readouterr().out
    assert "no weights are given" in shown
    assert "7 samples in " in shown
    assert lines_in("predictions.jsonl") == 7
    assert ended("predict train.py:job --data train.py:fwe --out b.jsonl", monkeypatch) == 2
    assert "train.py has no 'fwe'. Did you mean 'few'?" in capfd.readouterr().err
    assert ended("predict train.py --out b.jsonl", monkeypatch) == 2
    assert "meshwise predict needs a job" in capfd.readouterr().err


@pytest.mark.slow
def test_10003_samples_under_every_plan_killed_half_way_too(
    here: Path, processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "train.py:job --arg samples=10003 --batch-size 64"
    assert not ended(f"predict {words} --out one.jsonl", monkeypatch)
    one = outputs("one.jsonl")
    assert one.shape == (10003, 5)
    plans = {"data=3": 3, "shard=2": 2, "tensor=2": 2, "shard=2 --set tensor=2": 4}
    for number, (setting, devices) in enumerate(plans.items()):
        under = f"{words} --devices {devices}xcpu --set {setting}"
        assert not ended(f"predict {under} --out whole{number}.safetensors", monkeypatch)
        from safetensors.torch import load_file

        whole = load_file(f"whole{number}.safetensors")["output"]
        torch.testing.assert_close(whole, one, rtol=0, atol=1e-9)
    slow = words.replace("10003", "10003 --arg slow=0.03")
    process = started(f"{slow} --devices 3xcpu --out out.jsonl")
    wait_for(lambda: kept() >= 5000, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(1)  # its workers follow it
    done = kept()
    assert 5000 <= done < 10003
    assert not Path("out.jsonl").exists()
    Path("computed.txt").unlink()
    assert not ended(f"predict {slow} --devices 4xcpu --set shard=2 --set tensor=2 --out out.jsonl", monkeypatch)
    computed = sum(map(int, Path("computed.txt").read_text().split()))  # by both ranks of each tensor pair
    assert 2 * (10003 - done) <= computed <= 2 * (10003 - done + 64)
    torch.testing.assert_close(outputs("out.jsonl"), one, rtol=0, atol=1e-9)
