"""The examples of arrays on many devices: their lines give on two and three places what they give with NumPy, and move
no more than they say."""

from __future__ import annotations

import importlib.util
import math
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import meshwise as mw

FOLDER = Path(__file__).parents[2] / "examples" / "arrays"
PLACES = ["2xcpu", "3xcpu"]


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"arrays_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def moved(log: mw.CommLog) -> int:
    return sum(row.bytes for row in log if "host" not in (row.source, row.target))


@pytest.mark.parametrize("places", PLACES)
def test_tutorial(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tutorial, xp = example("tutorial", monkeypatch), mw.array_namespace(places)
    numbers = np.arange(1000, dtype=np.float32)
    with mw.comm_log() as log:
        doubled, roots, copied = tutorial.on_two_devices(xp, 1000)
    assert [each.device for each in (doubled, roots, copied)] == ["cpu:0", xp.devices[-1], xp.devices[-1]]
    for found, expected in zip((doubled, roots, copied), (numbers * 2, np.sqrt(numbers), numbers), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert moved(log) == 4000
    whole = tutorial.on_all_devices(xp, 1000)
    np.testing.assert_allclose(whole.numpy(), np.sqrt(numbers) * 2, rtol=1e-6)
    assert len(whole.shards) == len(xp.devices)


@pytest.mark.parametrize("places", PLACES)
def test_heat_moves_two_rows_at_each_border_a_step(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heat, xp = example("heat", monkeypatch), mw.array_namespace(places)
    start = heat.plate(20)
    with mw.comm_log() as log:
        found = heat.heat(xp, start, 10)
    np.testing.assert_allclose(found.numpy(), heat.heat(np, start, 10), rtol=0, atol=1e-15)
    assert moved(log) == 10 * (len(xp.devices) - 1) * 2 * 18 * 8
    with mw.comm_log() as log:
        found = heat.heat_with_halos(xp, start, 10)
    np.testing.assert_allclose(found.numpy(), heat.heat(np, start, 10), rtol=0, atol=1e-14)
    assert moved(log) == 10 * (len(xp.devices) - 1) * 2 * 20 * 8


@pytest.mark.parametrize("places", PLACES)
def test_life_moves_two_rows_at_each_border_a_generation(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    life, xp = example("life", monkeypatch), mw.array_namespace(places)
    start = (np.random.default_rng(1).random((17, 13)) < 0.4).astype(np.uint8)
    with mw.comm_log() as log:
        cells, lived = life.life(xp, start, 12)
    for found, expected in zip((cells, lived), life.life(np, start, 12), strict=True):
        assert np.array_equal(found.numpy(), expected)
    assert moved(log) == 12 * len(xp.devices) * 2 * 13


def test_monte_carlo_is_the_same_on_any_number_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    carlo, found = example("monte_carlo", monkeypatch), []
    for places in ("1xcpu", *PLACES):
        xp = mw.array_namespace(places)
        rng = xp.random.default_rng(3)
        x, y, normal = rng.random(20_000), rng.random(20_000), rng.standard_normal(20_000)
        with mw.comm_log() as log:
            pi, (price, error) = carlo.area(xp, x, y), carlo.call_price(xp, normal)
        found.append((pi, price, error))
        assert moved(log) <= 6 * 8 * (len(xp.devices) - 1)
        assert pi == pytest.approx(carlo.area(np, x.numpy(), y.numpy()), rel=1e-12)
        assert (price, error) == pytest.approx(carlo.call_price(np, normal.numpy()), rel=1e-12)
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[2] == pytest.approx(found[0], rel=1e-12)
    assert found[0][0] == pytest.approx(math.pi, abs=0.05)
    assert found[0][1] == pytest.approx(carlo.exact_call_price(), abs=4 * found[0][2])


@pytest.mark.parametrize("places", PLACES)
def test_film_moves_coordinates_only(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    film, xp = example("film", monkeypatch), mw.array_namespace(places)
    with mw.comm_log() as log:
        picture = film.frame(xp, 32, 0.3, steps=20)
    expected = film.frame(np, 32, 0.3, steps=20)
    assert picture.shape == (18, 32, 3)
    # Where a ray just touches something, one rounding decides what it hits: of 576 pixels at most two.
    apart = np.abs(picture.numpy() - expected).max(axis=-1) > 1e-9
    assert apart.sum() <= 2
    assert moved(log) <= 32 * 8 * 2 * (len(xp.devices) - 1)


@pytest.mark.parametrize(
    "name, words",
    [
        ("tutorial", ["--size", "100"]),
        ("heat", ["--size", "12", "--steps", "3"]),
        ("life", ["--size", "12", "--generations", "3"]),
        ("monte_carlo", ["--points", "1000"]),
        ("film", ["--width", "16"]),
    ],
)
def test_examples_show_seconds_bytes_and_a_picture(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--devices", "2xcpu", *words])
    example(name, monkeypatch).main()
    shown = capsys.readouterr().out
    assert "bytes moved between devices" in shown
    pictures = list(tmp_path.glob("*.png"))
    assert len(pictures) == (name in ("heat", "life", "film"))
    for picture in pictures:
        data = picture.read_bytes()
        length = data.index(b"IEND") - 8 - data.index(b"IDAT") - 4
        assert len(zlib.decompress(data[data.index(b"IDAT") + 4 :][:length])) > 0
