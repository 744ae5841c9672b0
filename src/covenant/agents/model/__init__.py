"""Agents that a language model plays: the model, its tools, its memory, its advisor."""
