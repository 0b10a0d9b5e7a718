"""What a cluster wants of every job."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwise.launcher.engines.site import Site, find_site, read_site
from meshwise.spec.errors import UsageError


def test_a_site_is_read(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('machine = "8xH100"\ncpus = 64\nsetup = ["module load cuda"]\nsecrets = ["WANDB_API_KEY"]\n')
    site = read_site(path)
    assert (site.machine, site.cpus, site.setup) == ("8xH100", 64, ("module load cuda",))
    assert (site.gpus, site.file) == ("gpus-per-node", str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("machine = 8", "must be a string in quotes"),
        ('cpus = "64"', "must be a whole number"),
        ("cpus = true", "must be a whole number"),
        ("cpus = -1", "must be 0 or more"),
        ('setup = "module load cuda"', "must be a list of strings"),
        ('partion = "gpu"', "Did you mean 'partition'?"),
        ('gpus = "tres"', "must be one of gpus-per-node, gres, none"),
        ('container = "a.sif"\nruntime = "docker"', "must be one of apptainer"),
        ('mounts = ["/data"]', "mounts need a container"),
        ('secrets = ["KEY=abc"]', "never their values"),
        ('options = ["constraint=ib"]', "must begin with -"),
        ('account = "a\\nb"', "line break"),
        ('setup = ["one\\ntwo"]', "line break"),
        ("machine = ", "is not a valid TOML file"),
    ],
)
def test_what_a_site_cannot_have_is_said(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text + "\n")
    with pytest.raises(UsageError, match=says.replace("?", r"\?")):
        read_site(path)


def test_a_value_of_a_secret_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('secrets = ["KEY=abcdef"]\n')
    with pytest.raises(UsageError) as raised:
        read_site(path)
    assert "abcdef" not in str(raised.value)


def test_the_site_beside_the_job_comes_before_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_site() == Site()
    (tmp_path / ".config/meshwise").mkdir(parents=True)
    (tmp_path / ".config/meshwise/site.toml").write_text('partition = "theirs"\n')
    assert find_site().partition == "theirs"
    (tmp_path / "site.toml").write_text('partition = "here"\n')
    assert find_site().partition == "here"
    with pytest.raises(UsageError, match="No such file"):
        find_site("other.toml")
