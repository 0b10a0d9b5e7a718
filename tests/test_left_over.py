"""What tests leave behind: tests/left_over.py."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import time
import warnings

import psutil
import pytest

from tests import left_over

PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_test_that_fails_leaves_no_process_and_no_warning_for_the_next_one(processes: None) -> None:
    with pytest.raises(AssertionError), left_over.killed():
        parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        raise AssertionError
    assert not psutil.pid_exists(parent.pid)
    deadline = time.monotonic() + 20
    with contextlib.suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the child in a session of its own still runs"
            time.sleep(0.01)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del parent
        gc.collect()
    assert not warned
