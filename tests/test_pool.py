"""The pool of workers that tests and benches share."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from meshwise.transfer import collectives
from tests.pool import CaseFailed


def ended_on_one() -> None:
    if collectives.get_rank() == 1:
        os._exit(3)


def test_a_worker_that_dies_is_a_failed_case_and_the_next_case_runs(pool: Any) -> None:
    with pytest.raises(CaseFailed, match=re.compile("ended in the middle of a case.*rank 1", re.DOTALL)):
        pool(2).run(ended_on_one)
    assert pool(2).run(collectives.get_rank) == [0, 1]
