"""The secret of a start is one that only this user knows, or there is none (workers/secret.py)."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshwise.spec.errors import UsageError
from meshwise.workers import secret
from meshwise.workers.secret import VARIABLE, Secret, secret_of

GIVEN = "0123456789abcdef0123456789abcdef"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that nobody finishes is given up soon."""
    monkeypatch.setattr(secret, "MAKING_TIMEOUT", 0.2)
    monkeypatch.delenv(VARIABLE, raising=False)


def file_of(folder: Path, name: str = "job") -> Path:
    """Where the secret of a start would lie."""
    path = secret_of(name, folder).path
    path.unlink()
    return path


def test_all_that_come_have_the_secret_of_the_first(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def come(_: int) -> Secret:
        together.wait()
        return secret_of("job", tmp_path)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(come, range(8)))
    assert len({each.value for each in found}) == 1
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path == found[0].path
    assert found[0].value.hex() not in path.read_text()  # one is made of it for each start


def test_each_start_has_another_although_the_environment_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f" {GIVEN}\n")
    one, other = (secret_of(name, tmp_path) for name in ("one", "other"))
    assert len({one.value, other.value, GIVEN.encode()}) == 3 and one.source == VARIABLE
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(VARIABLE, GIVEN)
    assert secret_of("one", tmp_path / "no folder").value == one.value


def test_one_that_could_be_guessed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "hunter2")
    with pytest.raises(UsageError, match=r"has only 7 characters, .* export MESHWISE_SECRET=\$\(openssl rand -hex 32"):
        secret_of("job", tmp_path)


def test_what_was_added_is_read_by_all_and_the_newest_counts(tmp_path: Path) -> None:
    secret_of("job", tmp_path).tell(port=1)
    secret_of("job", tmp_path).tell(port=2)
    assert secret_of("job", tmp_path).told["port"] == 2


def test_a_file_with_facts_alone_is_private_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, GIVEN)
    secret_of("job", tmp_path).tell(port=1)
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and secret_of("job", tmp_path).told == {"port": 1}
    assert "secret" not in path.read_text()


def link(path: Path) -> None:
    path.with_name("elsewhere").write_text(f'{{"secret": "{"0" * 64}"}}')
    path.with_name("elsewhere").chmod(0o600)
    path.symlink_to("elsewhere")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def hard_link(path: Path) -> None:
    link(path)
    path.unlink()
    path.hardlink_to(path.with_name("elsewhere"))


def open_to(mode: int) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        path.write_text(f'{{"secret": "{"0" * 64}"}}')
        path.chmod(mode)

    return plant


def of_nobody(path: Path) -> None:
    open_to(0o600)(path)
    os.chown(path, NOBODY, NOBODY)


PRIVATE = "is not a file of mode 100600 that belongs to user 0 alone (owner {}, mode {}, {} links)".format
PLANTED = {
    "a link": (link, "cannot be opened (Too many levels of symbolic links)"),
    "a link to nothing": (dangling, "cannot be opened (Too many levels of symbolic links)"),
    "another name": (hard_link, PRIVATE(0, 100600, 2)),
    "644": (open_to(0o644), PRIVATE(0, 100644, 1)),
    "620": (open_to(0o620), PRIVATE(0, 100620, 1)),
    "a folder": (Path.mkdir, PRIVATE(0, 40755, 2)),
    "a pipe": (os.mkfifo, PRIVATE(0, 10644, 1)),
    "empty": (lambda path: (path.touch(), path.chmod(0o600)), "contains no secret"),
    "short": (lambda path: (path.write_text('{"secret": "00"}'), path.chmod(0o600)), "contains no secret"),
}


@pytest.mark.parametrize("planted", [*PLANTED, pytest.param("of another", marks=as_root)])
def test_no_secret_is_taken_from_what_others_could_have_put_there(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, why = (PLANTED | {"of another": (of_nobody, PRIVATE(NOBODY, 100600, 1))})[planted]
    why = why.replace("user 0 alone (owner 0", f"user {os.geteuid()} alone (owner {os.geteuid()}")
    path = file_of(tmp_path)
    plant(path)
    with pytest.raises(UsageError) as refused:
        secret_of("job", tmp_path)
    said = f"{path} {why}, so it is not used. Remove the file, start in another folder, or give all"
    assert str(refused.value).startswith(said)
    monkeypatch.setenv(VARIABLE, GIVEN)
    if why == "contains no secret":  # none is needed
        assert secret_of("job", tmp_path).told.get("port") is None
    else:
        with pytest.raises(UsageError, match="so it is not used"):
            secret_of("job", tmp_path)
    assert os.path.lexists(path)  # nobody's file is removed unasked


def test_where_no_file_can_be_made_it_is_said_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be opened \(No such file or directory\).*export MESHWISE_SECRET="):
        secret_of("job", tmp_path / "missing")


def test_a_disk_that_keeps_no_modes_is_told_and_nothing_is_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat
    monkeypatch.setattr(secret.os, "fstat", lambda file: os.stat_result((0o100777, *real(file)[1:])), raising=True)
    with pytest.raises(UsageError, match="mode 100777, "):
        secret_of("job", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_ours_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert secret_of("job", tmp_path / "link").value == secret_of("job", tmp_path / "real").value
