"""The stations of examples/journey on two fake GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.evidence(
    "`make journey` ends: cleaning, training, a search with a trial per GPU, a student, 8 bits on the CPU"
)

JOURNEY = Path(__file__).parents[2] / "examples" / "journey" / "journey.py"


def test_the_journey_ends_on_gpus_with_a_model_in_8_bits(tmp_path: Path) -> None:
    words = [sys.executable, str(JOURNEY), "--images", "300", "--trials", "2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: Plan(data=2) computes what one device computes" in done.stdout
    assert "here, width 8: " in done.stdout
    assert re.search(r"^8 bits: [\d.]+%, \d+ KiB", done.stdout, re.MULTILINE)
    assert "cuda" in (tmp_path / "journey" / "rows" / "arrays.json").read_text()
