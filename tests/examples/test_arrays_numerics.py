"""Examples of arrays that stand on products, sorts and linear algebra: they give on two and three places what NumPy
gives, and move no more than they say."""

from __future__ import annotations

import numpy as np
import pytest

import meshwise as mw
from tests.examples.test_arrays import PLACES, example, moved


@pytest.mark.parametrize("places", PLACES)
def test_solvers_move_the_vector_alone(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    solvers, xp, n = example("solvers", monkeypatch), mw.array_namespace(places), 60
    others = len(xp.devices) - 1
    expected = np.linalg.solve(*solvers.equations(np, n))
    matrix, b = solvers.equations(xp, n)
    assert matrix.sharding.divided
    with mw.comm_log() as log:
        x = solvers.jacobi(xp, matrix, b, 40)
    np.testing.assert_allclose(x.numpy(), solvers.jacobi(np, *solvers.equations(np, n), 40), rtol=1e-12)
    assert moved(log) == 40 * others * n * 8
    with mw.comm_log() as log:
        x, steps = solvers.conjugate_gradients(xp, matrix, b)
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-9)
    assert moved(log) == (steps * (n + 5) + 1) * others * 8
    assert steps == solvers.conjugate_gradients(np, *solvers.equations(np, n))[1]


@pytest.mark.parametrize("places", PLACES)
def test_kmeans_moves_what_the_centres_weigh(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kmeans, xp, sizes = example("kmeans", monkeypatch), mw.array_namespace(places), []
    for count in (300, 3000):
        points = kmeans.clouds(count, 5)
        x, start = xp.asarray(points), xp.asarray(points[:5], sharding=xp.replicated())
        with mw.comm_log() as log:
            centres, nearest = kmeans.kmeans(xp, x, start, 6)
        for found, expected in zip((centres, nearest), kmeans.kmeans(np, points, points[:5], 6), strict=True):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)
        sizes.append(moved(log))
    assert sizes[0] == sizes[1] < 6 * (len(xp.devices) - 1) * 5 * 8 * 8


@pytest.mark.parametrize("places", PLACES)
def test_bodies_move_to_the_others_once_a_step(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nbody, xp, n = example("nbody", monkeypatch), mw.array_namespace(places), 40
    masses, *start = nbody.disc(n)
    everywhere = xp.asarray(masses, sharding=xp.replicated())
    with mw.comm_log() as log:
        found = nbody.step(xp, everywhere, *map(xp.asarray, start), 5)
    for ours, expected in zip(found, nbody.step(np, masses, *start, 5), strict=True):
        np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-10, atol=1e-12)
    assert moved(log) == 6 * (len(xp.devices) - 1) * n * 3 * 8
    assert nbody.picture(found[0].numpy()).shape == (400, 400, 3)


@pytest.mark.parametrize("places", PLACES)
def test_components_move_small_factors_alone(places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pca, xp = example("pca", monkeypatch), mw.array_namespace(places)
    values, others = pca.table(500, 8), len(xp.devices) - 1
    x = xp.asarray(values)
    with mw.comm_log() as log:
        scores, ways, shares = pca.principal(xp, x, 3)
    expected = pca.principal(np, values, 3)
    sign = np.sign((ways.numpy() * expected[1]).sum(axis=1))
    np.testing.assert_allclose(scores.numpy() * sign, expected[0], atol=1e-9)
    np.testing.assert_allclose(shares.numpy(), expected[2], rtol=1e-10)
    assert moved(log) < others * (2 * 8 * 8 + 40) * 8


def test_the_sort_prints_what_it_moved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["sort.py", "--devices", "3xcpu", "--size", "30000"])
    example("sort", monkeypatch).main()
    told = capsys.readouterr().out
    assert "equal to NumPy's: True" in told
    moved_bytes = int(told.split("bytes moved")[0].split()[-1].replace(",", ""))
    assert 0 < moved_bytes < 30_000 * 8
