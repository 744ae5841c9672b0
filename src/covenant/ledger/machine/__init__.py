"""The ledger's state machine. Pure: it decides what happens and what that changes, and does neither.

`decide(view, command, now_ms, new_id, ages)` reads through a `View` and returns events; `evolve(entry, event)` returns
the entry of a task after an event. Everything that affects a transition is in here, and nothing in here knows a clock,
a disk, a protocol or a caller.
"""
