"""The worker pool, the jobs it runs, and what a job may use and call."""
