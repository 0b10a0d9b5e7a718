"""docs/internals/evidence.md is what its tests and benches found.

No page says of GPUs what it does not say the rung of.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LEFT_OUT = {"api.md", "evidence.md", "fake-gpu.md", "log.md", "tutorials.md"}
"""What docstrings say, the page itself, that of the fake, what was found at the time, and what tutorials say."""
OF_DEVICES = re.compile(r"\bGPUs?\b|\bCUDA\b|\bNCCL\b|\bcuda\b")
WITHOUT = re.compile(r"\b[Nn]o GPUs?\b|without (?:a |one )?GPUs?")
RUNG = re.compile(r"\[(R[0-6]|none)\]\((?:docs/)?(?:internals/)?evidence\.md\)")
CLAIMS_NOTHING = (
    "- **Built on** PyTorch's own DDP",
    "| [tutorials](docs/tutorials.md)",
    "- Its network: ",  # a published run
    "| how a step is rehearsed",
    "| the catalog of GPUs",
    "Where a machine's own name has no address",
    "| **torch's store**, gloo and NCCL |",
    "On one machine everything listens",
    "Goals: none; 95 %; a third.",  # formulas beside ours
    "1. **Trace.**",
    "```toml\nmachine =",
    "- cuDNN's LSTM, GRU and RNN on a GPU",
    "Each is compared with NumPy by a test",
    "```python\nimport numpy as np",
    'xp = mw.array_namespace("2xcpu")',
    "dist.init_process_group()\ndevice = ",
    'device = "cuda" if ',
)
"""Paragraphs that name a part, a published figure or a word to write, and promise nothing of a device."""


def paragraphs(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n|\n(?=[-|#])", text)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in LEFT_OUT], ids=lambda page: page.name)
def test_what_a_page_says_of_gpus_names_its_rung(page: Path) -> None:
    for paragraph in paragraphs(page.read_text(encoding="utf-8")):
        if OF_DEVICES.search(WITHOUT.sub("", paragraph)) and not paragraph.startswith(CLAIMS_NOTHING):
            assert RUNG.search(paragraph), f"write [R2](evidence.md), the rung on which this stands: {paragraph[:200]}"


def test_a_claim_without_its_rung_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("Fine.\n\nIt is twice as fast on a GPU.\n")
    with pytest.raises(AssertionError, match="twice as fast"):
        test_what_a_page_says_of_gpus_names_its_rung(tmp_path / "page.md")


def test_every_exception_is_still_there() -> None:
    texts = [part for page in PAGES for part in paragraphs(page.read_text(encoding="utf-8"))]
    assert [words for words in CLAIMS_NOTHING if not any(part.startswith(words) for part in texts)] == []


def test_the_page_is_what_tests_and_benches_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import evidence

    try:
        assert (ROOT / "docs/internals/evidence.md").read_text(encoding="utf-8") == evidence.page()
    finally:
        del sys.modules["evidence"]


def test_every_test_on_the_fake_says_what_it_is_evidence_for() -> None:
    for path in sorted((ROOT / "tests/cuda").glob("test_*.py")):
        assert "\npytestmark = pytest.mark.evidence(" in path.read_text(), path.name
