"""The side that does a task for a peer."""
