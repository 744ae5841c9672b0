"""The ledger's state machine. Pure: it decides what happens and what that changes, and does neither.

`decide(view, command, now_ms, new_id, ages)` reads what it needs through a `View` and answers with events;
`evolve(entry, event)` says what an event does to a task. Everything that affects a transition is in here,
and nothing in here knows a clock, a disk, a protocol or a caller.
"""
