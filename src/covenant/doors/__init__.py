"""Doors: each decodes requests of one protocol, calls the exchange, and encodes the answers."""
