"""Train in a script's own loop or in a job's loop.

From the ground up: `autograd` (which rows a loss is a mean over) · `recovery` (save and load states) · `data` (which
rank reads which sample) · `slips` (counters of a resumed loop) · `engine` (one step: weights, backward, events) ·
`recording` (what a run records) · `guards` (mistakes, found in the first steps) · `process` (files and session of a
rank) · `tracking` (values to trackers) · `whole` (the loop sees whole batches) · `job` (the loop of a job) · `script`
(`mw.distribute` and its companions) · `prediction` · `jobs` (built-in jobs) · `commands`.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
