"""The dashboard: the pages at `/ui`, for people."""
