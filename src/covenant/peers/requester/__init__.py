"""The side that delegates a task to a peer."""
