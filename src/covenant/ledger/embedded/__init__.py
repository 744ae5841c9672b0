"""The embedded engine: a journal of decisions, the live state in memory, and an archive behind them."""
