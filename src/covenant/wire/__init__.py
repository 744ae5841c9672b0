"""Codecs between bytes and the model: mailbox, simple, JSON-RPC, SSE. No IO, no clock, no chance."""
