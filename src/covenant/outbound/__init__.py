"""Outgoing calls: which addresses may be called, and calls within limits."""
