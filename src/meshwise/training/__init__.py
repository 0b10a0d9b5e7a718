"""Train in a script's own loop or in that of a job.

From the ground up: `autograd` (which rows a loss is a mean over) · `data` (which rank reads which sample) · `engine`
(one step: weights, backward, events) · `recovery` (save and load states) · `recording` (what a run records) · `slips`
(counters of a resumed loop) · `guards` (mistakes, found in the first steps) · `process` (files and session of a rank) ·
`tracking` (values to trackers) · `whole` (the loop sees whole batches) · `job` (our own loop) · `script`
(`mw.distribute` and its verbs) · `prediction` · `jobs` (built-in jobs) · `commands`.
"""

from meshwise.spec.lazy import files_of

__getattr__ = files_of(__name__)
