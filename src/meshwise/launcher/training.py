"""Import what a rank needs to train.

This module is imported on first use, because the launcher of a job can often do without it.
"""

from meshwise.training.job.loop import run_job as run_job
from meshwise.training.jobs.registry import find_job as find_job
from meshwise.transfer.collectives import gather_objects as gather_objects
from meshwise.workers.join import join as join
from meshwise.workers.join import rank_context as rank_context
from meshwise.workers.stopping import agree_to_stop as agree_to_stop
