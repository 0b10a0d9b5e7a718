"""`meshwise doctor`: what it looks at here.

Of launcher/doctor.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwise.launcher import doctor

# ---- This machine ----------------------------------------------------------------------------------------------------


def test_a_full_or_locked_disk_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, found = doctor.disk_of(tmp_path)
    assert words.startswith(f"{tmp_path}: ") and words.endswith(" free") and found == []
    monkeypatch.setattr(doctor.os, "access", lambda folder, mode: False)
    monkeypatch.setattr(doctor, "LEAST_FREE", 2**80)
    full, locked = doctor.disk_of(tmp_path)[1]
    assert (full.why, locked.figure) == ("states of a run may not fit", str(tmp_path))
    assert all(each.what == "disk" and each.mend.startswith("--out FOLDER") for each in (full, locked))


def test_torch_and_gloo_are_asked_where_they_listen() -> None:
    store, gloo = doctor.listening()
    assert store == "every interface" and gloo
