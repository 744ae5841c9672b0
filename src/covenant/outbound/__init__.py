"""Calling others: which addresses may be called, and calling them within limits."""
