"""How long tests wait."""

from typing import Final

BOUND_S: Final = 100.0
"""Ends a wait for what never comes: longer than anything takes on a busy machine, shorter than the time of a test."""
