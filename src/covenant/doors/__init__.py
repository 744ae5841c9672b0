"""Listening: decode a request, call the exchange, encode the answer."""
