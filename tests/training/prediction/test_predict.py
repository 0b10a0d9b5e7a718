"""Predictions: every sample once and in order under any plan, written in parts, gone on with after a stop.

Tests training/prediction/options.py, training/prediction/parts.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import meshwise as mw
from meshwise.training.job.loop import run_job
from meshwise.training.job.options import RunOptions
from meshwise.training.prediction import predict
from meshwise.training.prediction.options import PredictOptions
from meshwise.training.prediction.parts import folder_of, join_parts, write_parts
from meshwise.training.prediction.predict import Predictions, run_predict, whole
from meshwise.training.weights import weights

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


def share(given: mw.Job, **options: Any) -> Predictions:
    return run_predict(given, PredictOptions(given, **options))


def predicted(given: mw.Job, **options: Any) -> Predictions:
    return whole([share(given, **options)])


def plainly() -> Tensor:
    torch.manual_seed(0)
    return by_batches(net())


def by_batches(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.cat([model.eval()(x) for x in X.split(8)])


def test_one_device_gives_what_the_model_gives_in_eval_mode() -> None:
    assert torch.equal(predicted(job()).outputs, plainly())


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("suffix", [".jsonl", ".safetensors"])
def test_several_devices_write_what_one_device_gives(devices: int, suffix: str, pool: Any, tmp_path: Path) -> None:
    out = tmp_path / f"out{suffix}"
    found = pool(devices).run(share_under, {"data": devices}, str(out))
    assert [each.samples for each in found] == [SAMPLES] * devices
    torch.testing.assert_close(read(out), plainly(), rtol=0, atol=1e-12)
    assert not out.with_name(f"{out.name}.partial").exists()


def share_under(plan: dict[str, int], out: str | None = None, wide: int = 0) -> Predictions:
    return share(job() if not wide else replace(job(), model=lambda: wide_net(wide)), plan=mw.Plan(**plan), out=out)


def wide_net(width: int) -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, width), *hidden, nn.Linear(width, 4)).double()


@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline"])
def test_a_divided_model_predicts_what_the_whole_one_does(axis: str, pool: Any, tmp_path: Path) -> None:
    one, plan = whole([share_under({}, wide=64)]).outputs, {axis: 2, "accumulate": 2 if axis == "pipeline" else 1}
    found = pool(2).run(share_under, plan, str(tmp_path / "out.jsonl"), 64)
    torch.testing.assert_close(read(tmp_path / "out.jsonl"), one, rtol=0, atol=1e-9)
    assert found[0].computed == SAMPLES


class Attends(nn.Module):
    """Token numbers to a vector for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 8).double(), nn.Linear(8, 4).double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).unsqueeze(1)
        return self.out(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1))


def share_of_positions(plan: dict[str, int]) -> Predictions:
    ids = torch.randint(9, (SAMPLES, 10), generator=torch.Generator().manual_seed(2))
    return share(replace(job(data=(ids,)), model=Attends), plan=mw.Plan(**plan))


def test_positions_that_are_divided_come_whole(pool: Any) -> None:
    found = whole(pool(2).run(share_of_positions, {"context": 2})).outputs
    torch.testing.assert_close(found, whole([share_of_positions({})]).outputs, rtol=0, atol=1e-12)
    assert found.shape == (SAMPLES, 10, 4)


def read(path: Path) -> Tensor:
    if path.suffix == ".safetensors":
        return load_file(path)["output"]
    return torch.tensor([json.loads(line) for line in path.read_text().splitlines()], dtype=torch.float64)


def strings(batch: Any) -> Any:
    """Rows of several kinds and lengths, the second of them as long as the rank's longest."""
    x = batch[0]
    return {"name": [f"{float(row[0]):.3f} é" for row in x], "part": x[:, : len(x)], "sum": x.sum(1)}


def share_of_strings(devices: int, out: str | None) -> Predictions:
    return share(job(lambda model, batch: strings(batch)), plan=mw.Plan(data=devices), out=out)


def test_dicts_of_strings_and_of_rows_of_any_length_are_objects_in_the_file(pool: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    pool(3).run(share_of_strings, 3, str(out))
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


@contextlib.contextmanager
def a_part_each_batch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "PART_SECONDS", 0)
        yield


def begun(out: Path, batches: int = 2) -> None:
    with a_part_each_batch(), pytest.raises(InterruptedError):
        predicted(job(Stops(batches)), out=out)


@pytest.mark.parametrize("suffix", [".jsonl", ".safetensors"])
def test_a_run_that_was_stopped_computes_what_is_left(suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"out{suffix}"
    begun(out, batches=3)
    assert not out.exists()
    rest = Stops(99)
    found = predicted(job(rest), out=out)
    assert (found.computed, rest.samples) == (SAMPLES - 24, SAMPLES - 24)
    assert torch.equal(read(out), plainly())


def test_a_part_that_a_killed_rank_did_not_finish_is_predicted_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    begun(out)
    parts = sorted(out.with_name("out.jsonl.partial").glob("0*.jsonl"))
    assert [part.name for part in parts] == [f"{a:012}-{a + 8:012}.jsonl" for a in (0, 8)]
    parts[0].rename(parts[0].with_name(f".{parts[0].name}.123.part"))  # as `atomic_file` leaves it after a kill
    rest = Stops(99)
    assert (predicted(job(rest), out=out).computed, rest.samples) == (SAMPLES - 8, SAMPLES - 8)
    assert torch.equal(read(out), plainly())
    assert not out.with_name("out.jsonl.partial").exists()


def test_parts_of_ranks_with_gaps_between_them_are_filled(pool: Any, tmp_path: Path) -> None:
    for suffix in (".jsonl", ".safetensors"):
        out = tmp_path / f"out{suffix}"
        pool(3).run(stopped_share, str(out))
        parts = sorted(out.with_name(f"{out.name}.partial").glob(f"0*{suffix}"))
        for part in parts[1::2]:
            part.unlink()
        kept = sum(int(part.stem[13:]) - int(part.stem[:12]) for part in parts[::2])
        assert len(parts) > 4
        found = pool(2).run(share_under, {"data": 2}, str(out))
        assert [each.computed for each in found] == [SAMPLES - kept] * 2
        torch.testing.assert_close(read(out), plainly(), rtol=0, atol=1e-12)


def stopped_share(out: str) -> None:
    with a_part_each_batch(), contextlib.suppress(InterruptedError):
        share(job(Stops(4)), plan=mw.Plan(data=3), out=out)


def test_parts_that_another_machine_has_are_missed(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    folder_of(out).mkdir()
    write_parts(out, [torch.arange(3, 7)], [{"": X[3:7]}])
    with pytest.raises(mw.UsageError, match=r"lacks 39 of 43 samples\. Name an --out in a folder that all"):
        join_parts(out, SAMPLES)


def test_other_predictions_do_not_go_on_in_a_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    begun(out)
    changed = X.clone()
    changed[-1] = 7
    save_file(net().state_dict(), tmp_path / "other.safetensors")
    for what, given, options in [
        ("data", job(data=(changed, X[:, 0])), {}),
        ("samples", job(data=(X[:-1], X[:-1, 0])), {}),
        ("weights", job(), {"weights": tmp_path / "other.safetensors"}),
        ("seed", replace(job(), seed=1), {}),
        ("precision", job(), {"settings": ("precision=bf16",)}),
    ]:
        with pytest.raises(mw.UsageError, match=f"contains predictions with {what} .* start over with --overwrite"):
            predicted(given, out=out, **options)
    found = predicted(replace(job(), seed=1), out=out, overwrite=True)
    assert found.computed == SAMPLES


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "out.jsonl"
    begun(out)
    with (tmp_path / "out.jsonl.partial/predict.lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(mw.UsageError, match="another process is writing"):
            predicted(job(), out=out)


def test_what_is_not_a_number_is_null_in_the_file(tmp_path: Path) -> None:
    x = X.clone()
    x[17, 2], x[40, 0] = float("nan"), float("inf")
    predicted(job(lambda model, batch: batch[0], (x,)), out=tmp_path / "out.jsonl")
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
    assert torch.equal(found.outputs, by_batches(Named().layer))
    assert any("it does not get row of the batches" in note for note in found.notes)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'inputs'"):
        predicted(replace(given, data=lambda: {"x": X}))


@pytest.mark.parametrize(
    ("predict", "says"),
    [
        (
            lambda model, batch: model(batch[0]).mean(),
            r"must predict a real row for each of 8 samples, .*, but predicts a Tensor of shape \(\)",
        ),
        (lambda model, batch: model(batch[0])[:3], r"a Tensor of shape \(3, 4\)"),
        (lambda model, batch: None, "predicts a NoneType"),
        (lambda model, batch: ["a"], r"a list of shape \(1,\)"),
        (
            lambda model, batch: torch.zeros(len(batch[0]), dtype=torch.complex64),
            "must predict a real row",
        ),
        (lambda model, batch: [object()] * len(batch[0]), "cannot be written as JSON"),
    ],
)
def test_outputs_without_a_row_for_each_sample_are_refused(predict: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(mw.UsageError, match=says):
        predicted(job(predict), out=tmp_path / "out.jsonl")


def test_rows_that_make_no_tensor_are_refused_in_safetensors(tmp_path: Path) -> None:
    for made in (lambda model, batch: batch[0][:, : len(batch[0]) - 2], lambda model, batch: ["a"] * len(batch[0])):
        with pytest.raises(mw.UsageError, match=r"Name a \.jsonl"):
            predicted(job(made), out=tmp_path / "out.safetensors", overwrite=True)


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
    assert torch.equal(predicted(given, weights=tmp_path / "w.safetensors").outputs, by_batches(other))
    assert any("no weights are given" in note for note in predicted(given).notes)
    with pytest.raises(mw.UsageError, match="does not fit the model"):
        predicted(job(), weights=tmp_path / "w.safetensors")
    (tmp_path / "w.pt").write_text("")
    with pytest.raises(mw.UsageError, match="is not a safetensors checkpoint"):
        predicted(job(), weights=tmp_path / "w.pt")


def trained(folder: Path) -> None:
    run_job(replace(job(), loss=lambda model, batch: model(batch[0]).square().mean()), RunOptions(), folder)
    (folder / "run.json").write_text("{}")


def test_a_run_folder_gives_its_weights_and_its_newest_state_those_that_are_written(tmp_path: Path) -> None:
    trained(tmp_path)
    model = net()
    model.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    expected = by_batches(model)
    assert torch.equal(predicted(job(), weights=tmp_path).outputs, expected)
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(mw.UsageError, match="write its newest weights with meshwise weights"):
        predicted(job(), weights=tmp_path)
    made, _ = weights(tmp_path, None, None, print)
    assert torch.equal(predicted(job(), weights=made).outputs, expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"out": "x.csv"}, r"ends in \.jsonl or \.safetensors"),
        ({"out": "{tmp}/there.jsonl"}, "exists. Name another file, or replace it with --overwrite"),
        ({"weights": "{tmp}/none"}, r"none does not exist. Name a run that has finished"),
        ({"batch_size": 0}, "must be at least 1"),
        ({"train": True, "data": (X,)}, "Use only one option"),
        ({"settings": ("precision=fp31",)}, "fp31"),
        ({"settings": ("shard=3",), "devices": "2xcpu"}, "needs 3 devices|shard"),
        ({"devices": ""}, "--devices is empty"),
        ({"data": "{tmp}/data.py:x"}, "no such file"),
        ({"data": "somewhere"}, "is a Job. Replace it by a function that takes `data`"),
    ],
)
def test_bad_input_is_one_sentence(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("[1]\n")
    given = {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in options.items()}
    with pytest.raises(mw.UsageError, match=says) as error:
        mw.predict(job(), **given)
    assert "\n" not in str(error.value)


def test_a_model_is_given_with_its_data() -> None:
    with pytest.raises(mw.UsageError, match="needs a Job, or a model and a data set"):
        mw.predict(net())
    with pytest.raises(mw.UsageError, match="needs a Job, or a model and a data set"):
        mw.predict([1], (X,))


def test_mw_predict_gives_the_outputs_of_a_model(processes: None) -> None:
    model = net()
    found = mw.predict(model, (X,), devices="2xcpu", batch_size=8)
    with torch.no_grad():
        torch.testing.assert_close(found.outputs, model.eval()(X), rtol=0, atol=1e-12)
    assert (found.samples, found.computed, found.path) == (SAMPLES, SAMPLES, None)
