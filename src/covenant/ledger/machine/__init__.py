"""The pure state machine: commands, events, decide, evolve. No IO, no clock, no chance."""
