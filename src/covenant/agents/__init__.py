"""The agents that run inside the daemon: functions, programs, language models, remote agents and agents of peers.

`runtime` has the worker pool, which leases tasks, and the job, which is one attempt at a turn. Each kind of agent has a
module; `model` has the agents of language models. `router` chooses an agent by keywords.
"""
