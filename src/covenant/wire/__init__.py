"""Bytes to model and back: mailbox, simple, JSON-RPC, SSE. No IO, no clock, no chance."""
