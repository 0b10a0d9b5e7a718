"""The text at the end of a run: what it says, that it lines up and fits, and its way through JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re

import pytest
from rich.console import Console

from meshwise.reports.views.run_text import RunSummary, summary_text
from meshwise.spec.json_values import json_value

PHASES = ({"data": 0.5, "forward": 2.0, "backward": 4.0, "communication": 1.0, "optimizer": 0.25, "evaluate": 0.25},)
ONE = RunSummary(
    job="mnist-mlp",
    plan="Plan(data=1)",
    devices=("cpu",),
    status="finished",
    epochs=5,
    steps=4690,
    samples=300_000,
    seconds=12.34,
    train_seconds=10.0,
    samples_per_second=30_000.4,
    metrics={"accuracy": 0.96621, "loss": 0.123456},
    phases=PHASES,
    memory=(512 * 2**20,),
    folder="runs/20260101-mnist-mlp",
    notes=(),
)


def on_ranks(count: int, **changes: object) -> RunSummary:
    phases = tuple({k: v * (1 + 0.1 * rank) for k, v in PHASES[0].items()} for rank in range(count))
    wide = dataclasses.replace(
        ONE, phases=phases, devices=("cpu",) * count, memory=(2**29,) * count, train_seconds=20.0
    )
    return dataclasses.replace(wide, **changes)


def printed(summary: RunSummary, width: int | None = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding)
    Console(file=file, force_terminal=False, width=80).print(summary_text(summary, width))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_the_whole_text_of_a_run_on_one_device() -> None:
    assert printed(ONE) == (
        "mnist-mlp finished after 5 epochs and 4,690 steps in 12.3 s\n"
        "test        accuracy 96.62 %   loss 0.1235\n"
        "throughput  30,000 samples/s on 1 device\n"
        "memory      peak 512.0 MiB\n"
        "\n"
        "Where the time went\n"
        "                 time  share\n"
        "data           500 ms    5 %  █▎\n"
        "forward         2.0 s   20 %  ████▊\n"
        "backward        4.0 s   40 %  █████████▋\n"
        "communication   1.0 s   10 %  ██▍\n"
        "optimizer      250 ms    2 %  ▋\n"
        "evaluate       250 ms    2 %  ▋\n"
        "other           2.0 s   20 %  ████▊\n"
        "total          10.0 s  100 %\n"
        "communication: from the last rank's arrival on, not overlapped with computing\n"
        "\n"
        "records     runs/20260101-mnist-mlp\n"
        "more with   meshwise report runs/20260101-mnist-mlp\n"
        "weights     runs/20260101-mnist-mlp/weights.safetensors\n"
    )


def test_several_ranks_have_their_mean_and_their_spread() -> None:
    lines = printed(on_ranks(2)).splitlines()
    head = next(line for line in lines if "median" in line)
    backward = next(line for line in lines if line.startswith("backward"))
    for title, value in (("time", "4.2 s"), ("min", "4.0 s"), ("max", "4.4 s")):
        assert head.index(title) + len(title) == backward.index(value) + len(value)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 9, 64])
@pytest.mark.parametrize("seconds", [1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_table_fits_and_lines_up(ranks: int, seconds: float, width: int) -> None:
    summary = on_ranks(ranks, train_seconds=20.0 * seconds)
    summary = dataclasses.replace(
        summary, phases=tuple({k: v * seconds for k, v in phases.items()} for phases in summary.phases)
    )
    text = printed(summary, width)
    assert all(len(line) <= 80 for line in text.splitlines()) and "\x1b" not in text
    table = text[text.index("share") : text.index("communication: from")].splitlines()[1:]
    assert all(len(line) <= width for line in table)
    assert len({line.index("%") for line in table}) == 1
    assert ranks == 1 or width == 40 or len({len(line) for line in table}) == 1


def test_a_narrow_table_has_fewer_columns_rather_than_cut_numbers() -> None:
    text = printed(on_ranks(4), 40)
    assert "median" not in text and "4.6 s" in text


def test_the_rows_add_up_to_the_time_of_training_and_evaluating() -> None:
    assert re.search(r"^other +2\.0 s +20 %", printed(ONE), re.MULTILINE)
    assert re.search(r"^total +20\.0 s +100 %", printed(on_ranks(2)), re.MULTILINE)
    assert "other" not in printed(dataclasses.replace(ONE, train_seconds=1.0))


def test_phases_that_took_no_time_have_no_row_and_unnamed_ones_have() -> None:
    text = printed(dataclasses.replace(ONE, phases=({"forward": 1.0, "transfer": 0.0, "waiting": 2.0},)))
    assert "transfer" not in text and "communication" not in text and "waiting" in text


def test_the_verdict_is_told_whole() -> None:
    verdict = "Communication-bound: " + "much " * 40 + "of it."
    assert " ".join(printed(dataclasses.replace(ONE, verdict=verdict)).split()).count(verdict) == 1


def test_a_stopped_run_says_how_to_go_on() -> None:
    text = printed(dataclasses.replace(ONE, status="stopped", folder="runs/my run", metrics={}, epochs=1))
    assert text.endswith("meshwise run --resume 'runs/my run'\n")
    assert "stopped after 1 epoch and 4,690 steps" in text and "weights" not in text and "accuracy" not in text


def test_names_and_notes_are_no_markup() -> None:
    text = printed(dataclasses.replace(ONE, job="[red]j[/red]", notes=("[bold]n[/bold]",), folder="[x]"))
    assert "[red]j[/red]" in text and "[bold]n[/bold]" in text and "[x]/weights.safetensors" in text


def test_a_console_without_blocks_gets_number_signs() -> None:
    assert "##########" in printed(ONE, encoding="ascii")


def test_a_run_without_phases_folder_or_memory_still_has_its_text() -> None:
    bare = dataclasses.replace(ONE, phases=(), folder="", memory=(None,), metrics={}, train_seconds=0.0)
    assert printed(bare).startswith("mnist-mlp finished")


def test_the_summary_as_json_has_every_field_as_it_is() -> None:
    summary = on_ranks(3, memory=(None, 1, 2), notes=("one",))
    record = json.loads(json.dumps(json_value(summary), allow_nan=False))
    assert [*record] == [field.name for field in dataclasses.fields(RunSummary)]
    for name, value in record.items():
        said = getattr(summary, name)
        assert value == (list(said) if isinstance(said, tuple) else said), name


def test_a_metric_that_is_not_finite_is_null() -> None:
    record = json_value(dataclasses.replace(ONE, metrics={"loss": math.nan, "accuracy": math.inf, "f1": 0.5}))
    assert json.loads(json.dumps(record, allow_nan=False))["metrics"] == {"loss": None, "accuracy": None, "f1": 0.5}
