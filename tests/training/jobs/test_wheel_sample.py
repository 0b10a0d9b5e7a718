"""A wheel carries a sample of MNIST, and a run of it says so."""

import gzip
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from meshwise.launcher.commands import run
from meshwise.training.job.options import RunOptions
from meshwise.training.jobs.mnist import MNIST, read_images

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """hatch_build.py, which otherwise only hatchling imports."""
    monkeypatch.setitem(
        sys.modules, "hatchling.builders.hooks.plugin.interface", SimpleNamespace(BuildHookInterface=object)
    )
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_sample_is_every_fifth_test_image_with_its_label(hook: ModuleType, tmp_path: Path) -> None:
    for file in MNIST.glob("t10k-*.gz"):
        (tmp_path / file.stem).write_bytes(hook.sample(gzip.decompress(file.read_bytes()), 5))
    kept, whole = read_images(tmp_path, "test"), read_images(MNIST, "test")
    assert len(kept) == 2000
    assert torch.equal(kept.pixels, whole.pixels[::5]) and torch.equal(kept.labels, whole.labels[::5])


def test_a_built_wheel_takes_the_sample_and_its_note(hook: ModuleType) -> None:
    build, taken = hook.SampleOfMnist(), dict[str, dict[str, str]](force_include={})
    build.root = str(ROOT)
    build.initialize("standard", taken)
    sizes = {Path(inside).name: Path(file).stat().st_size for file, inside in taken["force_include"].items()}
    build.finalize("standard", taken, "")
    assert sizes.keys() == {*(file.name for file in MNIST.glob("*.gz")), "SAMPLE.txt"}
    assert sum(sizes.values()) < 2_000_000


def test_an_editable_install_keeps_all_of_it(hook: ModuleType) -> None:
    taken = dict[str, dict[str, str]](force_include={})
    hook.SampleOfMnist().initialize("editable", taken)
    assert taken["force_include"] == {}


def test_a_run_of_the_sample_says_how_to_get_the_rest(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "SAMPLE.txt").write_text(hook.NOTE)
    monkeypatch.setattr(run, "SAMPLE", tmp_path / "SAMPLE.txt")
    for job, args, says in (("mnist-cnn", {}, True), ("mnist-cnn", {"data": tmp_path}, False), ("gpt", {}, False)):
        run._say_starting(RunOptions(job=job, args=args))
        assert ("10,000 of its 60,000" in capsys.readouterr().err) is says


def test_a_checkout_has_all_of_it() -> None:
    assert not run.SAMPLE.exists()
