"""Model agents: the language model, its tools, its memory, its advisor."""
