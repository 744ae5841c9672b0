"""Measurements of the promises about speed, next to other software on the same machine: see README.md."""
