"""Frozen domain values that every other package uses. Standard library and msgspec only; no clock, chance or IO."""
