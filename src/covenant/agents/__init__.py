"""Who does the work inside the daemon: functions, programs, and agents written for other frameworks.

A *body* does one turn of a task; a *job* is that turn, with what the body says about it on its way to the ledger; the
*crew* leases the tasks, runs the jobs and stops them.
"""
