"""Predictions: every sample once and in order under any plan, written as they come, gone on with after a stop.

Tests prediction/options.py, prediction/rows.py, prediction/files.py,
prediction/writer.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import meshwise as mw
from meshwise.job.loop import run_job
from meshwise.job.options import RunOptions
from meshwise.prediction.options import PredictOptions
from meshwise.prediction.predict import run_predict

SAMPLES = 43
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def net() -> nn.Module:
    layers = nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 4)
    return nn.Sequential(*layers).double()


def job(predict: Callable[[Any, Any], Any] | None = None, data: Any = None) -> mw.Job:
    return mw.Job(
        name="net",
        model=net,
        loss=lambda model, batch: model(batch[0]).sum(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=(X, X[:, 0]) if data is None else data,
        predict=predict,
        batch_size=8,
    )


def predicted(given: mw.Job, **options: Any) -> Any:
    return run_predict(given, PredictOptions(given, **options), {})


def plainly() -> Tensor:
    torch.manual_seed(0)
    return by_batches(net())


def by_batches(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.cat([model.eval()(x) for x in X.split(8)])


def test_one_device_gives_what_the_model_gives_in_eval_mode() -> None:
    assert torch.equal(predicted(job())["outputs"], plainly())


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("suffix", [".jsonl", ".safetensors"])
def test_several_devices_write_what_one_device_gives(devices: int, suffix: str, pool: Any, tmp_path: Path) -> None:
    out = tmp_path / f"out{suffix}"
    found = pool(devices).run(predicted_under, {"data": devices}, str(out))
    assert [each["samples"] for each in found] == [SAMPLES] * devices
    torch.testing.assert_close(read(out), plainly(), rtol=0, atol=1e-12)
    assert not out.with_name(f"{out.name}.partial").exists()


def predicted_under(plan: dict[str, int], out: str | None = None, wide: int = 0) -> Any:
    return predicted(job() if not wide else replace(job(), model=lambda: wide_net(wide)), plan=mw.Plan(**plan), out=out)


def wide_net(width: int) -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, width), *hidden, nn.Linear(width, 4)).double()


@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline"])
def test_a_divided_model_predicts_what_the_whole_one_does(axis: str, pool: Any, tmp_path: Path) -> None:
    one, plan = predicted_under({}, wide=64)["outputs"], {axis: 2, "accumulate": 2 if axis == "pipeline" else 1}
    found = pool(2).run(predicted_under, plan, str(tmp_path / "out.jsonl"), 64)
    torch.testing.assert_close(read(tmp_path / "out.jsonl"), one, rtol=0, atol=1e-9)
    assert found[0]["computed"] == SAMPLES


class Attends(nn.Module):
    """Token numbers to a vector for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 8).double(), nn.Linear(8, 4).double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(1)
        return self.out(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1))


def predicted_in_parts(plan: dict[str, int]) -> Any:
    ids = torch.randint(9, (SAMPLES, 10), generator=torch.Generator().manual_seed(2))
    return predicted(replace(job(data=(ids,)), model=Attends), plan=mw.Plan(**plan))


def test_positions_that_are_divided_come_whole(pool: Any) -> None:
    found = pool(2).run(predicted_in_parts, {"context": 2})[0]["outputs"]
    torch.testing.assert_close(found, predicted_in_parts({})["outputs"], rtol=0, atol=1e-12)
    assert found.shape == (SAMPLES, 10, 4)


def read(path: Path) -> Tensor:
    if path.suffix == ".safetensors":
        return load_file(path)["output"]
    return torch.tensor([json.loads(line) for line in path.read_text().splitlines()], dtype=torch.float64)


def strings(batch: Any) -> Any:
    """Rows of several kinds and lengths, the second of them as long as the rank's longest."""
    x = batch[0]
    return {"name": [f"{float(row[0]):.3f} é" for row in x], "part": x[:, : len(x)], "sum": x.sum(1)}


def predicted_strings(devices: int, out: str) -> Any:
    return predicted(job(lambda model, batch: strings(batch)), plan=mw.Plan(data=devices), out=out)


def test_dicts_of_strings_and_of_rows_of_any_length_are_objects_in_the_file(pool: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    pool(3).run(predicted_strings, 3, str(out))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["name"] for line in lines] == [f"{float(row[0]):.3f} é" for row in X]
    assert [line["sum"] for line in lines] == X.sum(1).tolist()
    assert all(line["part"] == X[i].tolist()[: len(line["part"])] for i, line in enumerate(lines))


class Stops:
    """Predicts, and stops as a crash would before batch `last`; counts the samples that it was given."""

    def __init__(self, last: int) -> None:
        self.last, self.calls, self.samples = last, 0, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if self.calls == self.last:
            raise InterruptedError
        self.calls, self.samples = self.calls + 1, self.samples + len(batch[0])
        return model(batch[0])


@pytest.mark.parametrize("suffix", [".jsonl", ".safetensors"])
def test_a_run_that_was_stopped_computes_what_is_left(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwise.prediction.writer.WRITE_SECONDS", 0)
    out = tmp_path / f"out{suffix}"
    with pytest.raises(InterruptedError):
        predicted(job(Stops(3)), out=out)
    assert not out.exists()
    rest = Stops(99)
    found = predicted(job(rest), out=out)
    assert (found["computed"], rest.samples) == (SAMPLES - 24, SAMPLES - 24)
    assert torch.equal(read(out), plainly())


def test_it_goes_on_on_another_number_of_devices(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.prediction.writer.WRITE_SECONDS", 0)
    out = tmp_path / "out.jsonl"
    with pytest.raises(InterruptedError):
        predicted(job(Stops(2)), out=out)
    assert pool(3).run(predicted_under, {"data": 3}, str(out))[0]["computed"] == SAMPLES - 16
    torch.testing.assert_close(read(out), plainly(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("torn", [b"[0.25, 0.", b"\0\0\0\0", b"[1, 2]\n[3"])
def test_a_torn_last_line_is_dropped(torn: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.prediction.writer.WRITE_SECONDS", 0)
    out = tmp_path / "out.jsonl"
    with pytest.raises(InterruptedError):
        predicted(job(Stops(2)), out=out)
    with (tmp_path / "out.jsonl.partial/outputs.jsonl").open("ab") as file:
        file.write(torn)
    assert predicted(job(), out=out)["computed"] == SAMPLES - 16
    assert torch.equal(read(out), plainly())


def begun(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.prediction.writer.WRITE_SECONDS", 0)
    with pytest.raises(InterruptedError):
        predicted(job(Stops(2)), out=out)


def test_other_predictions_do_not_go_on_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    begun(out, monkeypatch)
    changed = X.clone()
    changed[-1] = 7
    save_file(net().state_dict(), tmp_path / "other.safetensors")
    for what, given, options in [
        ("data", job(data=(changed, X[:, 0])), {}),
        ("samples", job(data=(X[:-1], X[:-1, 0])), {}),
        ("weights", job(), {"weights": tmp_path / "other.safetensors"}),
        ("seed", replace(job(), seed=1), {}),
        ("precision", job(), {"precision": "bf16"}),
    ]:
        with pytest.raises(mw.UsageError, match=f"contains predictions with {what} .* start over with --overwrite"):
            predicted(given, out=out, **options)
    found = predicted(replace(job(), seed=1), out=out, overwrite=True)
    assert found["computed"] == SAMPLES


def test_two_processes_do_not_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "out.jsonl"
    begun(out, monkeypatch)
    with (tmp_path / "out.jsonl.partial/lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(mw.UsageError, match="another process is writing"):
            predicted(job(), out=out)


def test_what_is_not_a_number_is_said_and_null_in_the_file(tmp_path: Path) -> None:
    x = X.clone()
    x[17, 2], x[40, 0] = float("nan"), float("inf")
    found = predicted(job(lambda model, batch: batch[0], (x,)), out=tmp_path / "out.jsonl")
    assert found["nan"] == [17]
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(lines[17])[2] is None
    assert json.loads(lines[40])[0] == float("inf")
    assert "NaN" not in "".join(lines)
    assert "Infinity" not in "".join(lines)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()

    def forward(self, inputs: Tensor, scale: float = 1.0, labels: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.layer(inputs) * scale, loss=labels)


def test_batches_that_are_dicts_are_given_by_name_and_logits_are_the_output() -> None:
    given = replace(job(data={"inputs": X, "row": X[:, 0]}), model=Named)
    found = predicted(given)
    torch.manual_seed(0)
    assert torch.equal(found["outputs"], by_batches(Named().layer))
    assert any("the model does not get row of the batches" in note for note in found["notes"])
    with pytest.raises(mw.UsageError, match=r"are x, but Named.forward takes inputs, scale, labels. Write Job"):
        predicted(replace(given, data=lambda: {"x": X}))


@pytest.mark.parametrize(
    ("predict", "says"),
    [
        (
            lambda model, batch: model(batch[0]).mean(),
            r"must predict a row for each of 8 samples, but predicts a tensor of shape \(\)",
        ),
        (lambda model, batch: model(batch[0])[:3], r"a tensor of shape \(3, 4\)"),
        (lambda model, batch: None, "predicts a NoneType"),
        (lambda model, batch: ["a"], "a list of length 1"),
        (lambda model, batch: torch.zeros(len(batch[0]), dtype=torch.complex64), "complex"),
        (lambda model, batch: [object()] * len(batch[0]), "cannot be written as JSON"),
    ],
)
def test_outputs_without_a_row_for_each_sample_are_refused(predict: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(mw.UsageError, match=says):
        predicted(job(predict), out=tmp_path / "out.jsonl")


def test_rows_that_make_no_tensor_are_refused_in_safetensors(tmp_path: Path) -> None:
    for predict in (lambda model, batch: batch[0][:, : len(batch[0]) - 2], lambda model, batch: ["a"] * len(batch[0])):
        with pytest.raises(mw.UsageError, match=r"Name a \.jsonl"):
            predicted(job(predict), out=tmp_path / "out.safetensors", overwrite=True)


def test_safetensors_hold_a_tensor_for_each_name_in_its_dtype(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    given = job(lambda model, batch: (batch[0].bfloat16(), batch[0] > 0, batch[0].argmax(1)))
    predicted(given, out=out)
    found = load_file(out)
    assert torch.equal(found["output.0"], X.bfloat16())
    assert torch.equal(found["output.1"], X > 0)
    assert torch.equal(found["output.2"], X.argmax(1))


def test_weights_are_those_of_a_file_a_finished_run_and_a_stopped_one(tmp_path: Path) -> None:
    given = replace(job(), model=lambda: nn.Linear(6, 4).double(), metrics=None)
    other = nn.Linear(6, 4).double()
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    assert torch.equal(predicted(given, weights=tmp_path / "w.safetensors")["outputs"], by_batches(other))
    assert any("no weights are given" in note for note in predicted(given)["notes"])
    with pytest.raises(mw.UsageError, match="does not fit the model"):
        predicted(job(), weights=tmp_path / "w.safetensors")


def trained(folder: Path) -> None:
    run_job(replace(job(), loss=lambda model, batch: model(batch[0]).square().mean()), RunOptions(), folder)
    (folder / "run.json").write_text("{}")


def test_a_run_folder_gives_its_weights_or_its_newest_state(tmp_path: Path) -> None:
    trained(tmp_path)
    model = net()
    model.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    expected = by_batches(model)
    assert torch.equal(predicted(job(), weights=tmp_path)["outputs"], expected)
    (tmp_path / "weights.safetensors").unlink()
    assert torch.equal(predicted(job(), weights=tmp_path)["outputs"], expected)
    with pytest.raises(mw.CheckpointError, match="another model"):
        predicted(replace(job(), model=lambda: nn.Linear(6, 4).double()), weights=tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/run.json").write_text("{}")
    with pytest.raises(mw.CheckpointError, match="has no weights and no checkpoint"):
        predicted(job(), weights=tmp_path / "empty")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": "x.csv"}, r"ends in \.jsonl or \.safetensors"),
        ({"out": "{tmp}/there.jsonl"}, "exists. Name another file, or replace it with --overwrite"),
        ({"out": "{tmp}/there.jsonl/x.jsonl"}, "there.jsonl is not a folder"),
        ({"weights": "{tmp}/none"}, "no such file or folder"),
        ({"weights": "{tmp}/w.pt"}, "this option reads only safetensors files"),
        ({"batch_size": 0}, "must be at least 1"),
        ({"train": True, "data": (X,)}, "Use only one option"),
        ({"precision": "fp31"}, "fp31"),
        ({"settings": ("shard=3",), "devices": "2xcpu"}, "needs 3 devices|shard"),
        ({"devices": ""}, "--devices is empty"),
        ({"data": "{tmp}/data.py:x"}, "no such file"),
        ({"data": "somewhere"}, "is a Job, which has its data already"),
    ],
)
def test_bad_input_is_one_sentence(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("[1]\n")
    (tmp_path / "w.pt").write_text("")
    given = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(mw.UsageError, match=says) as error:
        mw.predict(job(), **given)
    assert "\n" not in str(error.value)


def test_a_model_is_given_with_its_data() -> None:
    with pytest.raises(mw.UsageError, match="needs a model and a data set"):
        mw.predict(net())
    with pytest.raises(mw.UsageError, match=r"needs a Job, an nn.Module or a function that builds one, but got a list"):
        mw.predict([1], (X,))


def test_mw_predict_gives_the_outputs_of_a_model(processes: None) -> None:
    model = net()
    found = mw.predict(model, (X,), devices="2xcpu", batch_size=8)
    with torch.no_grad():
        torch.testing.assert_close(found.outputs, model.eval()(X), rtol=0, atol=1e-12)
    assert (found.samples, found.computed, found.nan, found.path) == (SAMPLES, SAMPLES, (), None)
