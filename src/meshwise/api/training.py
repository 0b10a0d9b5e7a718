"""What a rank trains with: an engine, and all that a plan may ask for. The launcher of a job does without.

Tested in tests/cli/test_start_up.py.
"""

from meshwise.job.loop import run_job as run_job
