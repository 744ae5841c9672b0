"""The agents that run inside the daemon: functions, programs, language models, remote agents and agents of peers.

`runtime` has the worker pool, which leases tasks, and the job, which is one attempt at a turn. There is a module for
each kind of agent; `model` has what plays a language model. `router` chooses an agent by its words.
"""
