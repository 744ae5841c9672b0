"""The worker pool, its jobs, and the limits, calls, steps and output of a job."""
