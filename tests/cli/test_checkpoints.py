"""`meshwise checkpoints` and `meshwise weights`: the saved states of a run, and the weights in them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import meshwise as mw
from meshwise.records import folder as names
from meshwise.spec.errors import UsageError
from meshwise.spec.world import World
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.recovery.saving import Saver
from meshwise.training.weights import weights

Command = Callable[..., tuple[int, str, str]]


def job() -> mw.Job:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    return mw.Job(
        name="net",
        model=lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        optimizer=lambda params: torch.optim.Adam(params),
        data=lambda: (x,),
        batch_size=4,
        epochs=1,
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run with states of steps 6, 9 and 10."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "20261123-net"
    names.begin_session(folder, time.time(), job="net")
    run_job(job(), RunOptions(save_every=3, keep=3), folder)
    return folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_the_states_of_a_loop_of_ones_own_are_listed_too(run: Path, command: Command) -> None:
    (run / "checkpoint").rename(run.parents[1] / "state")
    assert "mw.checkpoint: meshwise checkpoints FOLDER" in " ".join(command("checkpoints", "net")[1].split())
    code, shown, _ = command("checkpoints", "state", "--verify")
    assert code == 0 and shown.count("whole") == 3
    flip(run.parents[1] / "state" / "step-00000009.1" / "rank0.safetensors")
    assert command("checkpoints", "state", "--verify")[0] == 1


def test_the_states_of_a_run_are_listed_and_verified(run: Path, command: Command) -> None:
    code, shown, _ = command("checkpoints", "net")
    assert code == 0 and "3 checkpoints, " in shown and shown.count("not verified") == 3
    code, shown, _ = command("checkpoints", "--verify")
    assert code == 0 and shown.count("whole") == 3
    flip(run / "checkpoint" / "step-00000009.1" / "rank0.safetensors")
    assert command("checkpoints", run)[0] == 0  # the names of the files, their sizes
    code, shown, _ = command("checkpoints", run, "--verify")
    assert code == 1 and shown.count("whole") == 2
    assert "step-00000009.1: rank0.safetensors is damaged: its hash differs from the recorded one" in " ".join(
        shown.split()
    )
    code, shown, _ = command("checkpoints", run, "--verify", "--json")
    entries = json.loads(shown)
    assert [entry["step"] for entry in entries] == [6, 9, 10]
    assert [bool(entry["wrong"]) for entry in entries] == [False, True, False]


def test_a_run_without_states_says_how_to_save(run: Path, command: Command) -> None:
    names.begin_session(run.parent / "other", time.time(), job="other")
    code, shown, _ = command("checkpoints", "other")
    assert code == 0 and "No state was saved in" in shown and "--save-every" in shown
    code, _, told = command("weights", "other")
    assert code == 2 and "there is no checkpoint" in told
    assert command("checkpoints", "none of them")[0] == 2


def test_weights_are_those_of_the_newest_whole_state(run: Path, command: Command) -> None:
    code, shown, _ = command("weights", "net")
    assert code == 0 and shown.startswith("step 10: 4 tensors, 132 B: ")
    want, found = load_file(run / "weights.safetensors"), load_file(run / "weights" / "model.safetensors")
    assert found.keys() == want.keys() and all(found[name].equal(want[name]) for name in want)
    code, _, told = command("weights", "net")
    assert code == 2 and "exists already. Remove it, or name another folder with --out" in told
    flip(run / "checkpoint" / "step-00000010.1" / "rank0.safetensors")
    code, shown, told = command("weights", "net", "--out", "elsewhere")
    assert code == 0 and shown.startswith("step 9: ") and "Note: the checkpoint of step 10 is not used" in told
    code, shown, _ = command("weights", "net", "--out", "third", "--checkpoint", "step-00000006.1")
    assert code == 0 and shown.startswith("step 6: ")


def save(folder: Path, model: dict[str, Any]) -> None:
    saver = Saver(folder / names.CHECKPOINTS, World(), pytest.fail)
    saver.save(lambda: {"model": model}, {"step": 3})
    saver.settle()


def test_what_is_no_tensor_is_left_out_and_said(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(5)))
    said: list[str] = []
    save(tmp_path, model.state_dict() | {"0._extra_state": {"a": 1}})
    out, sentence = weights(tmp_path, None, None, said.append)
    assert sentence == f"step 3: 10 tensors, 2.1 KiB: {out}"
    assert said == ["left out because they are not tensors: 0._extra_state"]
    other = nn.Sequential(*(nn.Linear(10, 10) for _ in range(5)))
    mw.load_weights(other, out)
    assert all(value.equal(other.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(UsageError, match="safetensors cannot store complex128 of this model"):
        weights(tmp_path, None, None, pytest.fail)


def test_a_run_goes_on_from_an_older_state(run: Path) -> None:
    ends = load_file(run / "weights.safetensors")
    options = RunOptions(resume=run / "checkpoint" / "step-00000006.1", keep=9)
    facts = run_job(job(), options, run)
    assert facts["began"]["step"] == 6 and len(facts["losses"]) == 4
    assert all(value.equal(ends[name]) for name, value in load_file(run / "weights.safetensors").items())
    assert {path.name for path in (run / "checkpoint").iterdir()} >= {"step-00000006.1", "step-00000010.2"}
