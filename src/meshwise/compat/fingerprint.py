"""Read the fingerprint that Hugging Face datasets keep of their content.

Read in datasets 5.2: `arrow_dataset.py`. Tested in tests/guards/test_replicas.py.
"""

from __future__ import annotations

from typing import Any


def fingerprint(data: Any) -> str | None:
    """Return the content fingerprint of a Hugging Face data set; None for any other data set."""
    found = getattr(data, "_fingerprint", None)
    return found if isinstance(found, str) else None
