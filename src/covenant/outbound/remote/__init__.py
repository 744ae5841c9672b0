"""Calling a remote agent over A2A: its card, its interfaces, one message and the task that follows."""
