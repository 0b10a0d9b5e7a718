"""The job, the step, the loop, the loader and the evaluation."""
