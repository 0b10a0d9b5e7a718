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
from safetensors.torch import load_file

Predict = Callable[[str], tuple[int, str]]

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


@pytest.fixture
def predict(command: Callable[..., tuple[int, str, str]], here: Path, processes: None, capfd: object) -> Predict:
    """`predict("train.py:job --out o")`: the exit code, and what was said."""

    def call(words: str) -> tuple[int, str]:
        code, out, err = command("predict", *words.split())
        return code, out + err

    return call


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


def test_a_run_stopped_by_ctrl_c_goes_on(predict: Predict) -> None:
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
    code, said = predict("train.py:job --arg slow=0.0 --out out.jsonl")
    assert code == 2 and "contains predictions with arguments " in said
    Path("computed.txt").unlink()
    code, said = predict("train.py:job --arg slow=0.2 --out out.jsonl --devices 2xcpu")
    assert code == 0 and f"({done} of them by an earlier call)" in said
    assert sum(map(int, Path("computed.txt").read_text().split())) == 200 - done
    assert lines_in("out.jsonl") == 200
    code, said = predict("train.py:job --arg slow=0.2 --out out.jsonl")
    assert code == 2 and "out.jsonl: the file exists" in said


def test_the_data_set_may_be_named_in_a_file(predict: Predict) -> None:
    code, said = predict("train.py:job --data train.py:few")
    assert code == 0 and "no weights are given" in said and "7 samples in " in said
    assert lines_in("predictions.jsonl") == 7
    code, said = predict("train.py:job --data train.py:fwe --out b.jsonl")
    assert code == 2 and "train.py has no 'fwe'. Did you mean 'few'?" in said
    code, said = predict("train.py --out b.jsonl")
    assert code == 2 and "meshwise predict needs a job" in said


@pytest.mark.slow
def test_10003_samples_under_every_plan_killed_half_way_too(predict: Predict) -> None:
    words = "train.py:job --arg samples=10003 --batch-size 64"
    assert predict(f"{words} --out one.jsonl")[0] == 0
    one = outputs("one.jsonl")
    assert one.shape == (10003, 5)
    plans = {"data=3": 3, "shard=2": 2, "tensor=2": 2, "shard=2 --set tensor=2": 4}
    for number, (setting, devices) in enumerate(plans.items()):
        under = f"{words} --devices {devices}xcpu --set {setting}"
        assert predict(f"{under} --out whole{number}.safetensors")[0] == 0
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
    assert predict(f"{slow} --devices 4xcpu --set shard=2 --set tensor=2 --out out.jsonl")[0] == 0
    computed = sum(map(int, Path("computed.txt").read_text().split()))  # by both ranks of each tensor pair
    assert 2 * (10003 - done) <= computed <= 2 * (10003 - done + 64)
    torch.testing.assert_close(outputs("out.jsonl"), one, rtol=0, atol=1e-9)
