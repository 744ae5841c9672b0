"""Frozen facts: what the other packages talk about. Standard library and msgspec only; no clock, chance or IO."""
